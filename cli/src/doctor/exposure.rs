//! Open ports: ports that other hosts reach without TLS, and ports that accept callers without a token.

use super::findings::{Finding, Weight};
use super::pool::Pool;
use std::net::IpAddr;

/// One note for each open port of the pool.
pub(super) fn of(pool: &Pool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |text| findings.push(Finding::new(Weight::Note, text));
    for master in &pool.masters {
        if let Some(authority) = master.address.strip_prefix("http://")
            && is_beyond_loopback(authority)
        {
            add(format!(
                "master {authority} is open to other hosts without TLS: set --tls-cert and --tls-key on it \
                 and call https://{authority}"
            ));
        }
    }
    if pool.takes_strangers == Some(true) {
        if pool.has_token {
            add(
                "the pool takes callers without a token, although you show one: set --auth-jwks on every \
                 kvmaster and kvstore-node"
                    .to_owned(),
            );
        } else if pool
            .masters
            .iter()
            .any(|one| is_beyond_loopback(authority_of(&one.address)))
        {
            add(
                "the pool asks its callers for no token: each one that TLS lets in, or each one where there is no \
                 TLS, can read, fill and empty it (--auth-jwks on every daemon)"
                    .to_owned(),
            );
        }
    }
    for node in &pool.nodes {
        let address = &node.data_address;
        if !address.starts_with(kvpool_tls::DATA_SCHEME) && is_beyond_loopback(address) {
            add(format!(
                "node {} is open to other hosts at {address} without TLS: set --tls-cert and --tls-key on it",
                node.name
            ));
        }
        // Where no daemon asks for tokens, the note about the pool says so.
        if node.takes_strangers == Some(true) && pool.takes_strangers == Some(false) {
            add(format!(
                "node {} takes callers without a token at {address}, and the pool does not: set --auth-jwks, \
                 --auth-issuer and --auth-policy on it as on the masters",
                node.name
            ));
        }
    }
    findings
}

/// The address of a master without its scheme.
fn authority_of(address: &str) -> &str {
    address
        .split_once("://")
        .map_or(address, |(_, authority)| authority)
}

/// Whether `HOST:PORT` names another host than this one. A name counts, but for `localhost`.
fn is_beyond_loopback(authority: &str) -> bool {
    let Some((host, _)) = authority.rsplit_once(':') else {
        return false;
    };
    let host = host.trim_matches(['[', ']']);
    match host.parse::<IpAddr>() {
        Ok(ip) => !ip.to_canonical().is_loopback(),
        Err(_) => !host.eq_ignore_ascii_case("localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_no_exposure() {
        for (authority, open) in [
            ("127.0.0.1:7070", false),
            ("[::1]:7070", false),
            ("localhost:7070", false),
            ("", false),
            ("10.0.0.1:7070", true),
            ("[fd00::1]:7070", true),
            ("master.pool:7070", true),
        ] {
            assert_eq!(is_beyond_loopback(authority), open, "{authority}");
        }
    }
}
