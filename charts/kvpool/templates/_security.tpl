{{/*
The flags and files of TLS, tokens and `--insecure`. No other template sets them.
Each template takes {root, role}, where the role is master, node or client (kvctl).
*/}}
{{- define "kvpool.security.args" -}}
{{- $security := .root.Values.security -}}
{{- $tls := $security.tls -}}
{{- $tokens := $security.tokens -}}
{{- $isDaemon := ne .role "client" -}}
{{- if $tls.secretName }}
- --tls-ca=/etc/kvpool/tls/{{ $tls.caKey }}
- --tls-cert=/etc/kvpool/tls/{{ $tls.certKey }}
- --tls-key=/etc/kvpool/tls/{{ $tls.keyKey }}
{{- with $tls.serverName }}
- --tls-server-name={{ . }}
{{- end }}
{{- if $isDaemon }}
- --tls-client-auth={{ $tls.clientAuth }}
{{- end }}
{{- end }}
{{- if $tokens.configMapName }}
{{- if $isDaemon }}
- --auth-jwks=/etc/kvpool/auth/{{ $tokens.jwksKey }}
- --auth-policy=/etc/kvpool/auth/{{ $tokens.policyKey }}
- --auth-issuer={{ $tokens.issuer }}
- --auth-audience={{ $tokens.audience }}
- --auth-http-open={{ $tokens.openMetrics | ternary "health,metrics" "health" }}
{{- end }}
{{- if ne .role "master" }}
- --token-file=/var/run/secrets/kvpool/token
{{- end }}
{{- end }}
{{- if and $isDaemon (not $tls.secretName) (not $tokens.configMapName) }}
- --insecure
{{- end }}
{{- end }}

{{- define "kvpool.security.volumeMounts" -}}
{{- $security := .root.Values.security -}}
{{- if $security.tls.secretName }}
- {name: tls, mountPath: /etc/kvpool/tls, readOnly: true}
{{- end }}
{{- if $security.tokens.configMapName }}
{{- if ne .role "client" }}
- {name: auth, mountPath: /etc/kvpool/auth, readOnly: true}
{{- end }}
- {name: token, mountPath: /var/run/secrets/kvpool, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvpool.security.volumes" -}}
{{- $security := .root.Values.security -}}
{{- if $security.tls.secretName }}
- name: tls
  secret: {secretName: {{ $security.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- if $security.tokens.configMapName }}
{{- if ne .role "client" }}
- name: auth
  configMap: {name: {{ $security.tokens.configMapName }}, defaultMode: 0444}
{{- end }}
# The kubelet renews the token, and the programs read it again.
- name: token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          path: token
          audience: {{ $security.tokens.audience }}
          expirationSeconds: 3600
{{- end }}
{{- end }}

{{/*
The token of scrapes. `helm upgrade --reuse-values` takes no defaults of a newer chart, so a release of an earlier chart
lacks these values.
*/}}
{{- define "kvpool.scrapeAuth" -}}
{{- $auth := default dict .Values.monitoring.podMonitor.auth -}}
{{- if $auth.secretName -}}
authorization:
  type: Bearer
  credentials: {name: {{ $auth.secretName }}, key: {{ default "token" $auth.tokenKey }}}
{{- end }}
{{- end }}

{{- define "kvpool.scheme" -}}
{{- .Values.security.tls.secretName | empty | ternary "http" "https" -}}
{{- end }}
