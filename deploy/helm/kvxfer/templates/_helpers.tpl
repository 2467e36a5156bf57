{{- define "kvxfer.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) | trunc 28 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Arguments of the next three: a dict of root and component. */}}
{{- define "kvxfer.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvxfer.labels" -}}
{{ include "kvxfer.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "kvxfer.metadata" -}}
name: {{ include "kvxfer.fullname" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "kvxfer.labels" . | nindent 2 }}
{{- end -}}

{{/* Argument: a dict of root and kind (service, vllm, sglang). */}}
{{- define "kvxfer.image" -}}
{{- $image := index .root.Values.images .kind -}}
image: {{ printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) | quote }}
{{- with .root.Values.images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{- define "kvxfer.uses-coordinator" -}}
{{- if ne .Values.engine "sglang" }}true{{ end -}}
{{- end -}}

{{/* One Deployment, or a StatefulSet, whose pods have names that everyone knows. */}}
{{- define "kvxfer.has-several-coordinators" -}}
{{- if gt (int .Values.coordinator.replicas) 1 }}true{{ end -}}
{{- end -}}

{{/* What agents and routers are told: host:port of each, with commas. */}}
{{- define "kvxfer.coordinators" -}}
{{- $name := printf "%s-coordinator" (include "kvxfer.fullname" .) -}}
{{- $found := list -}}
{{- if include "kvxfer.has-several-coordinators" . -}}
{{- range $i := until (int .Values.coordinator.replicas) -}}
{{- $found = append $found (printf "%s-%d.%ss.%s.svc:%v" $name $i $name $.Release.Namespace $.Values.coordinator.port) -}}
{{- end -}}
{{- else -}}
{{- $found = append $found (printf "%s:%v" $name .Values.coordinator.port) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{- define "kvxfer.router-scheme" -}}
{{- ternary "https" "http" .Values.tls.router.enabled -}}
{{- end -}}

{{- define "kvxfer.router-secret" -}}
{{- default (printf "%s-router-tls" (include "kvxfer.fullname" .)) .Values.tls.router.secretName -}}
{{- end -}}

{{/* Kubernetes puts a variable for each Service into every pod, such as KVXFER_ROUTER_PORT=tcp://...: kvxfer and vLLM would
     read them as settings. So no pod gets them. */}}
{{- define "kvxfer.pod" -}}
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvxfer.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kvxfer.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* What is not there is refused, rather than rendered as if it were. */}}
{{- define "kvxfer.refusals" -}}
{{- include "kvxfer.grpc-refusals" . -}}
{{- with .Values.coordinator -}}
{{- if and (gt (int .replicas) 1) (not (hasPrefix "etcd:" .store)) -}}
{{- fail (printf "coordinator.store: %d coordinators need a store that they share, etcd:HOST:PORT,..., and not %s" (int .replicas) .store) -}}
{{- end -}}
{{- if and .storeTls.secretName (not (hasPrefix "etcd:" .store)) -}}
{{- fail (printf "coordinator.storeTls.secretName: only a store in etcd is reached over TLS, and not %s" .store) -}}
{{- end -}}
{{- end -}}
{{- with .Values.tls.router -}}
{{- if and .certManager.enabled (not .enabled) -}}
{{- fail "tls.router.certManager.enabled: tls.router.enabled must be true too" -}}
{{- end -}}
{{- if and .enabled (not .certManager.enabled) (not .secretName) -}}
{{- fail "tls.router.secretName: name a TLS secret, or set tls.router.certManager.enabled" -}}
{{- end -}}
{{- if and .certManager.enabled (not .certManager.issuer) -}}
{{- fail "tls.router.certManager.issuer: name the issuer" -}}
{{- end -}}
{{- end -}}
{{- end -}}
