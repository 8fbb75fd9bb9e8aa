{{/* The flags of the daemons: the chart's, and behind them the operator's. */}}

{{/* The flags that the chart sets for a kvmaster, as items of args. */}}
{{- define "kvpool.masterArgs" -}}
{{- $master := .Values.master -}}
{{- $etcd := .Values.etcd -}}
{{- $isEmbedded := eq $master.store "embedded" }}
- --listen={{ include "kvpool.everyInterface" . }}:7070
- --http-listen={{ include "kvpool.everyInterface" . }}:7071
- --advertise=$(POD_NAME).{{ .Release.Namespace }}.svc:7070
- --commit-ack={{ $master.commitAck }}
- --eviction-policy={{ $master.evictionPolicy }}
{{- if $isEmbedded }}
- --data-dir=/data/kvmaster
{{- else }}
- --etcd={{ include "kvpool.etcdEndpoints" . }}
- --cluster={{ default (printf "%s.%s" .Release.Namespace (include "kvpool.fullname" .)) $etcd.cluster }}
- --etcd-compact={{ $etcd.compact }}
- --leader-ttl={{ $etcd.leaderTtl }}
{{- if $etcd.tls.secretName }}
- --etcd-ca=/etc/kvpool/etcd-tls/{{ $etcd.tls.caKey }}
{{- if $etcd.tls.certKey }}
- --etcd-cert=/etc/kvpool/etcd-tls/{{ $etcd.tls.certKey }}
- --etcd-key=/etc/kvpool/etcd-tls/{{ $etcd.tls.keyKey }}
{{- end }}
{{- end }}
{{- if $etcd.auth.user }}
- --etcd-user={{ $etcd.auth.user }}
- --etcd-password-file=/etc/kvpool/etcd-auth/{{ $etcd.auth.passwordKey }}
{{- end }}
{{- end }}
{{- end }}

{{/* The flags that the chart sets for a kvstore-node, as items of args. */}}
{{- define "kvpool.nodeArgs" -}}
{{- $node := .Values.node -}}
{{- $isDaemonSet := eq $node.kind "DaemonSet" }}
- --master={{ include "kvpool.masters" . }}
- --name={{ $isDaemonSet | ternary "$(HOST_NAME)" "$(POD_NAME)" }}
- --segment={{ join "," $node.segments }}
- --listen={{ include "kvpool.everyInterface" . }}:{{ $node.ports.data }}
- --http-listen={{ include "kvpool.everyInterface" . }}:{{ $node.ports.http }}
- --advertise=$(POD_IP)
{{- if $node.sharedMemory.enabled }}
- --shm-path=/run/kvpool/{{ $isDaemonSet | ternary "node" "$(POD_NAME)" }}.sock
{{- else }}
- --no-shm
{{- end }}
{{- if $node.hugepages }}
- --hugepages
{{- end }}
{{- if not $node.rdma.enabled }}
- --no-rdma
{{- else if $node.rdma.devices }}
- --rdma-device={{ join "," $node.rdma.devices }}
{{- end }}
{{- if $node.ssd.enabled }}
{{- $parts := list }}
{{- with $node.ssd.size }}{{ $parts = append $parts (printf "size=%s" .) }}{{ end }}
{{- with $node.ssd.dwpd }}{{ $parts = append $parts (printf "dwpd=%v" .) }}{{ end }}
{{- range $node.ssd.namespaces }}{{ $parts = append $parts (printf "namespace=%s" .) }}{{ end }}
{{- range include "kvpool.disks" . | fromYamlArray }}
- {{ printf "--ssd=%s" (join "," (prepend $parts (printf "dir=/%s" .))) | quote }}
{{- end }}
- --ssd-drain-timeout={{ $node.drain.ssdSeconds }}s
{{- end }}
- --drain-timeout={{ $node.drain.workSeconds }}s
- --move-drain-timeout={{ $node.drain.moveSeconds }}s
{{- end }}

{{/* Settings of both daemons, as items of args: {root, role, values}. */}}
{{- define "kvpool.daemonArgs" -}}
- --log-format={{ .root.Values.logFormat }}
{{- with include "kvpool.security.args" . }}
{{ . }}
{{- end }}
{{- end }}

{{/*
The items of args of a daemon: {root, role, values}. A daemon refuses a flag that stands twice, and its pods would then
restart for ever. The flags of $lists add to a list.
*/}}
{{- define "kvpool.args" -}}
{{- $chart := include (printf "kvpool.%sArgs" .role) .root -}}
{{- $args := printf "%s\n%s" (trim $chart) (include "kvpool.daemonArgs" . | trim) -}}
{{- $lists := list "--master" "--segment" "--ssd" "--rdma-device" "--etcd" "--auth-http-open" -}}
{{- $role := .role -}}
{{- $set := list -}}
{{- range fromYamlArray $args }}{{ $set = append $set (splitList "=" . | first) }}{{ end -}}
{{- $extra := list -}}
{{- range .values.extraArgs -}}
  {{- $flag := splitList "=" . | first -}}
  {{- if has $flag $lists -}}
  {{- else if has $flag $set -}}
    {{- fail (printf "%s.extraArgs: the chart sets %s already: change the value for it" $role $flag) -}}
  {{- else if has $flag $extra -}}
    {{- fail (printf "%s.extraArgs: %s stands there twice" $role $flag) -}}
  {{- end -}}
  {{- $extra = append $extra $flag -}}
{{- end -}}
{{ $args }}
{{- with .values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}
