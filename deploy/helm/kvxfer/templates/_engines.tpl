{{/* Arguments of each: a dict of root, role, pool. What runs in a pool's container, from `command` to `args`. */}}
{{- define "kvxfer.engine.kvxfer" -}}
args:
  - worker
  - --role={{ .role }}
  - --model={{ .root.Values.model.name }}
  {{- with .root.Values.model.servedName }}
  - --served-model-name={{ . }}
  {{- end }}
  - --agent-id={{ include "kvxfer.agent-id" . }}
  - --host=0.0.0.0
  {{- if .root.Values.tls.workers.enabled }}
  {{- include "kvxfer.serving-flags" .root | nindent 2 }}
  {{- else }}
  - --insecure
  {{- end }}
  - --advertise-host=$(POD_IP)
  - --port={{ .root.Values.workers.port }}
  - --probe-port={{ .root.Values.workers.probePort }}
  - --metrics-port={{ .root.Values.workers.metricsPort }}
  - --data-port={{ .root.Values.workers.dataPort }}
  - --coordinator={{ include "kvxfer.coordinators" .root }}
  {{- include "kvxfer.proof-flags" .root | nindent 2 }}
  - --shutdown-grace-s={{ .root.Values.workers.shutdownGraceSeconds }}
  - --log-style=json
{{- with .pool.extraArgs }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{- define "kvxfer.engine.vllm" -}}
{{- $values := .root.Values -}}
{{- $extra := dict
    "coordinator" (include "kvxfer.coordinators" .root)
    "agent_id" (include "kvxfer.agent-id" .)
    "http_url" (printf "http://$(POD_IP):%v" $values.workers.port)
    "bind_host" "0.0.0.0" "bind_port" $values.workers.dataPort "advertise_host" "$(POD_IP)"
    "insecure" true -}}
{{- if $values.tls.grpc.enabled -}}
{{- range $part, $file := dict "ca" "ca.crt" "cert" "tls.crt" "key" "tls.key" -}}
{{- $_ := set $extra (printf "coordinator_%s_file" $part) (printf "/etc/kvxfer/grpc-tls/%s" $file) -}}
{{- end -}}
{{- else -}}
{{- $_ := set $extra "token_file" "/etc/kvxfer/secrets/cluster-token" -}}
{{- end -}}
{{- $transfer := dict
    "kv_connector" "KvxferConnector" "kv_role" (ternary "kv_producer" "kv_consumer" (eq .role "prefill"))
    "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra -}}
command: [vllm, serve]
args:
  - {{ $values.model.name }}
  {{- with $values.model.servedName }}
  - --served-model-name={{ . }}
  {{- end }}
  - --host=0.0.0.0
  - --port={{ $values.workers.port }}
  - --kv-transfer-config={{ $transfer | toJson }}
  - --shutdown-timeout={{ $values.workers.shutdownGraceSeconds }}
  {{- if eq .role "prefill" }}
  - --middleware=kvxfer.connectors.vllm.arrivals.Arrivals
  {{- end }}
{{- with .pool.extraArgs }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{- define "kvxfer.engine.sglang" -}}
command: [python3, -m, sglang.launch_server]
args:
  - --model-path={{ .root.Values.model.name }}
  {{- with .root.Values.model.servedName }}
  - --served-model-name={{ . }}
  {{- end }}
  - --host=0.0.0.0
  - --port={{ .root.Values.workers.port }}
  - --disaggregation-mode={{ .role }}
  - --disaggregation-transfer-backend=kvxfer
  - --disaggregation-bootstrap-port={{ .root.Values.workers.bootstrapPort }}
  - --enable-metrics
{{- with .pool.extraArgs }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* Variables beside those that every worker gets. */}}
{{- define "kvxfer.engine-env" -}}
{{- $role := .role -}}
{{- with .root -}}
{{- if eq .Values.engine "sglang" -}}
- {name: SGLANG_HOST_IP, value: $(POD_IP)}
- {name: KVXFER_SGLANG_HOST, value: 0.0.0.0}
- {name: KVXFER_SGLANG_ADVERTISE, value: $(POD_IP)}
- {name: KVXFER_SGLANG_INSECURE, value: "1"}
- {name: KVXFER_SGLANG_TOKEN_FILE, value: /etc/kvxfer/secrets/cluster-token}
{{- else -}}
{{- $root := . -}}
{{- $name := include "kvxfer.fullname" . -}}
{{- $routers := list -}}
{{- range $i := until (int (ternary .Values.router.autoscaling.maxReplicas .Values.router.replicas .Values.router.autoscaling.enabled)) -}}
{{- $routers = append $routers (printf "%s://%s-router-%d.%s-routers.%s.svc:%v" (include "kvxfer.router-scheme" $root) $name $i $name $root.Release.Namespace $root.Values.router.port) -}}
{{- end -}}
- {name: DRAIN_AGENT, value: {{ include "kvxfer.agent-id" (dict "root" . "role" $role) }}}
- {name: DRAIN_ROUTERS, value: {{ join " " $routers | quote }}}
- {name: DRAIN_SECONDS, value: {{ .Values.workers.drainSeconds | quote }}}
- {name: DRAIN_LIVE_URL, value: {{ (eq .Values.engine "kvxfer" | ternary (printf "http://127.0.0.1:%v/live" .Values.workers.probePort) (printf "http://127.0.0.1:%v/health" .Values.workers.port)) | quote }}}
- {name: DRAIN_ADMIN_KEY_FILE, value: /etc/kvxfer/secrets/admin-key}
- {name: DRAIN_CA_FILE, value: {{ ternary "/etc/kvxfer/router-ca/ca.crt" "" .Values.tls.router.enabled | quote }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Variables of every container of a pool. */}}
{{- define "kvxfer.worker-env" -}}
- {name: HOME, value: /var/lib/kvxfer}
- {name: XDG_CACHE_HOME, value: /var/lib/kvxfer/cache}
{{- with .Values.model.hubToken }}
{{- if .secret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}}
{{- end }}
{{- end }}
{{- end -}}
