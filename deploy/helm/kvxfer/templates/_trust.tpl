{{/* Certificates for the calls to the coordinator (tls.grpc), and for the HTTP between routers and workers (tls.workers): who has
     which, and where it is. A pool has one, whose name speaks for all its agents: their ids are the name, a dot, and the pod.
     Parts that only one place uses are not here. */}}
{{- define "kvxfer.grpc-refusals" -}}
{{- $root := . -}}
{{- if .Values.tls.workers.enabled -}}
{{- if ne .Values.engine "kvxfer" -}}
{{- fail (printf "tls.workers.enabled: the HTTP port of engine %s knows no roles, and the probes and Prometheus ask it without a certificate; keep it off, and networkPolicy.enabled on" .Values.engine) -}}
{{- end -}}
{{- if not .Values.tls.grpc.enabled -}}
{{- fail "tls.workers.enabled: tls.grpc.enabled must be true too, because it has the certificates" -}}
{{- end -}}
{{- end -}}
{{- with .Values.tls.grpc -}}
{{- if and .enabled (not (include "kvxfer.uses-coordinator" $root)) -}}
{{- fail (printf "tls.grpc.enabled: with engine %s this chart has no coordinator, so there are no calls to encrypt; keep it off" $root.Values.engine) -}}
{{- end -}}
{{- if and .certManager.enabled (not .enabled) -}}
{{- fail "tls.grpc.certManager.enabled: tls.grpc.enabled must be true too" -}}
{{- end -}}
{{- if and .revoked (not .enabled) -}}
{{- fail "tls.grpc.revoked: tls.grpc.enabled must be true too" -}}
{{- end -}}
{{- if and .enabled .certManager.enabled -}}
{{- if not .certManager.issuer -}}
{{- fail "tls.grpc.certManager.issuer: name the issuer" -}}
{{- end -}}
{{- if not .cluster -}}
{{- fail "tls.grpc.cluster: name the cluster; clusters whose certificates come from one issuer need different names" -}}
{{- end -}}
{{- end -}}
{{- if and .enabled (not .certManager.enabled) -}}
{{- range $component, $secret := .secretNames -}}
{{- if not $secret -}}
{{- fail (printf "tls.grpc.secretNames.%s: name its secret, or set tls.grpc.certManager.enabled" $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Arguments of the next three: a dict of root and component. */}}
{{- define "kvxfer.grpc-secret" -}}
{{- default (printf "%s-%s-grpc" (include "kvxfer.fullname" .root) .component) (get .root.Values.tls.grpc.secretNames .component) -}}
{{- end -}}

{{- define "kvxfer.grpc-mount" -}}
{{- if .Values.tls.grpc.enabled -}}
- {name: grpc-tls, mountPath: /etc/kvxfer/grpc-tls, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "kvxfer.grpc-volume" -}}
{{- if .root.Values.tls.grpc.enabled -}}
- name: grpc-tls
  secret: {secretName: {{ include "kvxfer.grpc-secret" . }}, defaultMode: 0400}
{{- end -}}
{{- end -}}

{{/* What a worker or a router shows to the coordinator: its certificate, or the token. */}}
{{- define "kvxfer.proof-flags" -}}
{{- if .Values.tls.grpc.enabled -}}
- --coordinator-ca-file=/etc/kvxfer/grpc-tls/ca.crt
- --coordinator-cert-file=/etc/kvxfer/grpc-tls/tls.crt
- --coordinator-key-file=/etc/kvxfer/grpc-tls/tls.key
{{- else -}}
- --token-file=/etc/kvxfer/secrets/cluster-token
{{- end -}}
{{- end -}}

{{/* What the coordinators, and workers with tls.workers, serve TLS with: their callers show certificates too. */}}
{{- define "kvxfer.serving-flags" -}}
- --tls-cert-file=/etc/kvxfer/grpc-tls/tls.crt
- --tls-key-file=/etc/kvxfer/grpc-tls/tls.key
- --tls-client-ca-file=/etc/kvxfer/grpc-tls/ca.crt
- --revoked-file=/etc/kvxfer/revoked/revoked
{{- end -}}

{{- define "kvxfer.revoked-mount" -}}
- {name: revoked, mountPath: /etc/kvxfer/revoked, readOnly: true}
{{- end -}}

{{- define "kvxfer.revoked-volume" -}}
- {name: revoked, configMap: {name: {{ include "kvxfer.fullname" . }}-coordinator-revoked}}
{{- end -}}

{{/* Whether a pod other than the coordinator's holds the cluster token. */}}
{{- define "kvxfer.shares-token" -}}
{{- if not .Values.tls.grpc.enabled }}true{{ end -}}
{{- end -}}

{{/* Argument: a dict of root and role. */}}
{{- define "kvxfer.agent-id" -}}
{{- if .root.Values.tls.grpc.enabled }}{{ .role }}.{{ end }}$(POD_NAME)
{{- end -}}
