{{/*
Sets of values that cannot work together, although each value alone could. A message begins with the value to change.
*/}}
{{- define "kvpool.validate" -}}
{{- $v := .Values -}}
{{- $etcd := $v.etcd -}}
{{- $node := $v.node -}}
{{- if eq $v.master.store "embedded" -}}
  {{- if gt (int $v.master.replicas) 1 -}}
    {{- fail "master.replicas: the embedded store serves one master: set 1, or master.store: etcd" -}}
  {{- end -}}
  {{- if or $etcd.endpoints $etcd.trial.enabled -}}
    {{- fail "master.store: embedded ignores etcd.endpoints and etcd.trial: set master.store: etcd, or remove them" -}}
  {{- end -}}
{{- else -}}
  {{- if and $etcd.endpoints $etcd.trial.enabled -}}
    {{- fail "etcd.trial.enabled: etcd.endpoints names another etcd: use one of them" -}}
  {{- end -}}
  {{- if not (or $etcd.endpoints $etcd.trial.enabled) -}}
    {{- fail "etcd.endpoints: master.store: etcd needs the addresses of an etcd, or etcd.trial.enabled" -}}
  {{- end -}}
{{- end -}}
{{- if and $etcd.trial.enabled (not $etcd.trial.image) -}}
  {{- fail "etcd.trial.image: name an image that has the program etcd" -}}
{{- end -}}
{{- if and $etcd.trial.enabled (or $etcd.tls.secretName $etcd.auth.user) -}}
  {{- fail "etcd.trial.enabled: the etcd for trials has neither TLS nor users: remove etcd.tls and etcd.auth" -}}
{{- end -}}
{{- range $etcd.endpoints -}}
  {{- if and (hasPrefix "https:" .) (not $etcd.tls.secretName) -}}
    {{- fail (printf "etcd.tls.secretName: %s needs a secret with the CA of its certificate" .) -}}
  {{- end -}}
  {{- if and (hasPrefix "http:" .) $etcd.tls.secretName -}}
    {{- fail (printf "etcd.endpoints: %s is not https, although etcd.tls.secretName is set" .) -}}
  {{- end -}}
{{- end -}}
{{- if ne (empty $etcd.tls.certKey) (empty $etcd.tls.keyKey) -}}
  {{- fail "etcd.tls.certKey: a client certificate needs etcd.tls.keyKey too, and the other way round" -}}
{{- end -}}
{{- if and $etcd.tls.certKey (not $etcd.tls.secretName) -}}
  {{- fail "etcd.tls.secretName: etcd.tls.certKey is a key of this secret" -}}
{{- end -}}
{{- if ne (empty $etcd.auth.user) (empty $etcd.auth.secretName) -}}
  {{- fail "etcd.auth.secretName: etcd.auth.user and the secret with its password go together" -}}
{{- end -}}
{{- $security := $v.security -}}
{{- if not (or $security.tls.secretName $security.tokens.configMapName $security.insecure) -}}
  {{- fail "security.insecure: false needs security.tls.secretName or security.tokens.configMapName" -}}
{{- end -}}
{{- if and $security.tokens.configMapName (not $security.tokens.issuer) -}}
  {{- fail "security.tokens.issuer: name the issuer of the tokens, such as that of the cluster's service accounts" -}}
{{- end -}}
{{- if and $security.tokens.issuer (not $security.tokens.configMapName) -}}
  {{- fail "security.tokens.configMapName: security.tokens.issuer turns no tokens on: name the JWKS and the policy" -}}
{{- end -}}
{{- $scrapesWithToken := include "kvpool.scrapeAuth" . -}}
{{- if and $scrapesWithToken (not $security.tokens.configMapName) -}}
  {{- fail "monitoring.podMonitor.auth.secretName: the daemons ask for no token: set security.tokens too" -}}
{{- end -}}
{{- $asksScrapes := and $security.tokens.configMapName (not $security.tokens.openMetrics) -}}
{{- if and $v.monitoring.podMonitor.enabled $asksScrapes (not $scrapesWithToken) -}}
  {{- fail "monitoring.podMonitor.auth.secretName: scrapes need a token, or security.tokens.openMetrics" -}}
{{- end -}}
{{- if $node.hugepages -}}
  {{- range $node.segments -}}
    {{- if mod (include "kvpool.mebibytes" . | int64) 2 -}}
      {{- fail (printf "node.segments: %s is no multiple of 2MiB, the size of a hugepage" .) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if $node.ssd.enabled -}}
  {{- if and (eq $node.ssd.volume "claim") (ne $node.kind "StatefulSet") -}}
    {{- fail "node.ssd.volume: only node.kind: StatefulSet can have a claim for each store node: use hostPath" -}}
  {{- end -}}
  {{- if and (eq $node.ssd.volume "hostPath") (not $node.ssd.hostPaths) -}}
    {{- fail "node.ssd.hostPaths: name the directories of each host that keep the blocks" -}}
  {{- end -}}
{{- end -}}
{{- if and $node.hostPID (not $node.sharedMemory.enabled) -}}
  {{- fail "node.hostPID: only shared memory needs it, and node.sharedMemory.enabled is false" -}}
{{- end -}}
{{- if and $node.rdma.devices (not $node.rdma.enabled) -}}
  {{- fail "node.rdma.devices: set node.rdma.enabled too" -}}
{{- end -}}
{{- if eq (int $node.ports.data) (int $node.ports.http) -}}
  {{- fail "node.ports.http: the same port as node.ports.data" -}}
{{- end -}}
{{- if and $node.hostNetwork $v.networkPolicy.enabled (not $v.networkPolicy.hostCIDRs) -}}
  {{- fail "networkPolicy.hostCIDRs: with node.hostNetwork, name the hosts, or disable networkPolicy" -}}
{{- end -}}
{{- range $component := list "master" "node" -}}
  {{- $account := (get $v $component).serviceAccount -}}
  {{- if and (not $account.create) $account.annotations -}}
    {{- fail (printf "%s.serviceAccount.annotations: set create, or annotate your account" $component) -}}
  {{- end -}}
{{- end -}}
{{- end }}
