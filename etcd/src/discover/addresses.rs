//! Parses the addresses of masters. Every program uses this module, so that all programs accept the same addresses.

use super::{Location, SCHEME, behind_scheme, split_list};

/// The environment variable with the default addresses of clients and store nodes.
const MASTER_VARIABLE: &str = "KVPOOL_MASTER";

/// The address of a master when nothing names one.
pub const DEFAULT_MASTER: &str = "http://127.0.0.1:7070";

const FORMS: &str = "write HOST:PORT, http://HOST:PORT, https://HOST:PORT or etcd://HOST:PORT[,HOST:PORT...]/CLUSTER";

/// Why an address of a master cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{address:?} is not a master address: {reason}")]
pub struct BadMaster {
    /// The address that was given.
    pub address: String,
    /// The reason, and the valid forms.
    pub reason: String,
}

/// The masters in `KVPOOL_MASTER`, or the default address. They are not checked: see [`parse_master`].
pub fn default_masters() -> Vec<String> {
    named_by(std::env::var_os(MASTER_VARIABLE).map(|list| list.to_string_lossy().into_owned()))
}

fn named_by(list: Option<String>) -> Vec<String> {
    list.map_or_else(|| vec![DEFAULT_MASTER.to_owned()], |list| split_list(&list))
}

/// One address as clients call it: `http://HOST:PORT`, `https://HOST:PORT`, or `etcd://` and the rest as it was given.
/// The scheme may be in capitals.
/// Without a scheme it is `http://`. An `https://` address without a port has port 443.
pub fn parse_master(text: &str) -> Result<String, BadMaster> {
    let bad = |reason: &str| BadMaster {
        address: text.to_owned(),
        reason: format!("{reason}; {FORMS}"),
    };
    if let Some(rest) = behind_scheme(text) {
        return match Location::parse(text) {
            Ok(_) => Ok(format!("{SCHEME}{rest}")),
            Err(error) => Err(bad(error.reason)),
        };
    }
    if text.is_empty() {
        return Err(bad(
            "it is empty: --master, KVPOOL_MASTER or a list ends in nothing",
        ));
    }
    let (scheme, authority) = match text.split_once("://") {
        Some((scheme, authority)) => {
            let known = ["http", "https"];
            let known = known
                .into_iter()
                .find(|one| scheme.eq_ignore_ascii_case(one));
            let scheme = known.ok_or_else(|| bad("the scheme is not known"))?;
            (scheme, authority)
        }
        None => ("http", text),
    };
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    // An address in brackets ends with one, and a name has no colon.
    let has_port = !authority.ends_with(']') && authority.contains(':');
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if has_port => (host, port),
        // An ingress has port 443. Without TLS a missing port is a mistake, because no master listens on port 80.
        _ if scheme == "https" => (authority, "443"),
        _ => return Err(bad("the port is missing")),
    };
    let is_host = |c: char| c.is_ascii_alphanumeric() || "-._~%".contains(c);
    let in_brackets = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let fits = match in_brackets {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(is_host),
    };
    if !fits {
        return Err(bad("the host is not a name, an IPv4 or an [IPv6] address"));
    }
    let is_number = port.chars().all(|c| c.is_ascii_digit());
    if !is_number || !port.parse::<u16>().is_ok_and(|port| port != 0) {
        return Err(bad("the port is not a number from 1 to 65535"));
    }
    Ok(format!("{scheme}://{host}:{port}"))
}

/// The same for several addresses. An error names the first that cannot be read.
pub fn parse_masters<'a>(
    given: impl IntoIterator<Item = &'a String>,
) -> Result<Vec<String>, BadMaster> {
    given.into_iter().map(|one| parse_master(one)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(list: &str) -> Result<Vec<String>, BadMaster> {
        parse_masters(&split_list(list))
    }

    #[test]
    fn a_master_needs_a_host_and_a_port_and_no_scheme() {
        for (typed, meant) in [
            ("a:7070", "http://a:7070"),
            ("http://a:7070/", "http://a:7070"),
            ("https://a:7070", "https://a:7070"),
            ("https://a", "https://a:443"),
            ("https://[::1]", "https://[::1]:443"),
            ("[::1]:7070", "http://[::1]:7070"),
            ("a:1, http://b:2", "http://a:1,http://b:2"),
            ("etcd://a:1,b:2/prod,c:3", "etcd://a:1,b:2/prod,http://c:3"),
            ("HTTP://a:7070", "http://a:7070"),
            ("Https://A", "https://A:443"),
            (
                "ETCD://a:1,b:2/Prod,HTTP://c:3",
                "etcd://a:1,b:2/Prod,http://c:3",
            ),
        ] {
            assert_eq!(read(typed).unwrap().join(","), meant);
        }
        for wrong in [
            "",
            "a",
            ":7070",
            "a:0",
            "a:70700",
            "ftp://a:1",
            "http://",
            "http://:7070",
            "http://a b",
            "http://a",
            "a:+1",
            "[::1]",
            "a b:1",
            "::1:7070",
            "a:1,",
            "etcd://a:1",
            "etcd://a/pool",
        ] {
            let said = read(wrong).unwrap_err().to_string();
            assert!(said.contains("HOST:PORT"), "{wrong}: {said}");
        }
    }

    #[test]
    fn the_environment_names_the_masters_when_nothing_else_does() {
        assert_eq!(named_by(None), [DEFAULT_MASTER]);
        assert_eq!(named_by(Some("a:1,b:2".to_owned())), ["a:1", "b:2"]);
        // An empty variable is a mistake in a script. The default would reach another pool.
        assert!(parse_masters(&named_by(Some(String::new()))).is_err());
    }
}
