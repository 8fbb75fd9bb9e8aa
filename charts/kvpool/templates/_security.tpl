{{/*
Authentication and TLS of the pool: the one place for their flags, variables and files.
Each template takes {root, role}, where the role is master, node or client (kvctl). The daemons and the pods that run
kvctl include all four. They write nothing as long as the programs have no such settings.
*/}}
{{- define "kvpool.security.args" -}}
{{- end }}

{{- define "kvpool.security.env" -}}
{{- end }}

{{- define "kvpool.security.volumeMounts" -}}
{{- end }}

{{- define "kvpool.security.volumes" -}}
{{- end }}
