"""The commands of Mooncake Store deployments, which start kvpool's own commands.

- `master`: mooncake_master, in front of kvmaster
- `client`: mooncake_client, in front of kvstore-node
- `http_metadata_server`: mooncake_http_metadata_server
- `flags`: the parser of command lines; `sources`: the files that flags come from
- `master_flags`, `logging_flags`: tables of flags
- `programs`: finds and runs kvpool's commands
- `web`, `metadata`: HTTP
"""
