"""The commands that deployments of Mooncake Store start, in front of kvpool's own.

- `master`: mooncake_master, in front of kvmaster
- `client`: mooncake_client, in front of kvstore-node
- `http_metadata_server`: mooncake_http_metadata_server
- `flags`: their command lines; `sources`: the files that flags come from; `master_flags`, `logging_flags`: what
  there is of them; `programs`: finding and running kvpool's commands; `web`, `metadata`: HTTP
"""
