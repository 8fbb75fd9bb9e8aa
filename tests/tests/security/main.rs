//! Authentication and rights over real processes: TLS, tokens, secrets, and unknown callers at the
//! ports.

mod etcd_access;
mod hostile;
mod rights_data;
mod secrets;
mod signed_fail_over;
mod tls;
mod tls_downgrade;
mod tls_masters;
mod token_command;
mod token_files;
