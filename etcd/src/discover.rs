//! How clients find a pool in etcd: the name `etcd://host:port[,host:port...]/cluster`, and the keys under which its
//! masters announce themselves.
//!
//! ```text
//!  /kvpool/<cluster>/leader        JSON with "address", bound to a lease: who leads
//!  /kvpool/<cluster>/members/<id>  JSON with "address", bound to a lease: each master that runs
//! ```
//!
//! The name supports no TLS and no password. For an etcd that requires them, list the masters
//! instead.

mod addresses;

use crate::client::{Client, Options};
use crate::error::Error;
use crate::kv::{KeyValue, Op, Range, Txn};
use std::time::Duration;

pub use addresses::{BadMaster, DEFAULT_MASTER, default_masters, parse_master, parse_masters};

/// The key of the leader, under [`root`].
pub const LEADER: &str = "leader";
/// The prefix of the keys of the masters, under [`root`].
pub const MEMBERS: &str = "members/";

const SCHEME: &str = "etcd://";
const MAX_NAME: usize = 64;

/// The prefix of all keys of a pool.
pub fn root(cluster: &str) -> String {
    format!("/kvpool/{cluster}/")
}

/// Whether a text is a valid name of a cluster: at most 64 letters, digits, `.`, `_` and `-`.
pub fn is_cluster_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed)
}

/// The part of an address after `etcd://`; `None` for another address. The case of a scheme has no meaning (RFC 3986,
/// section 3.1).
fn behind_scheme(address: &str) -> Option<&str> {
    let (scheme, rest) = address.split_at_checked(SCHEME.len())?;
    scheme.eq_ignore_ascii_case(SCHEME).then_some(rest)
}

/// Splits a list at its commas, above all a list of addresses. Commas between `etcd://` and the cluster's name do not
/// split.
pub fn split_list(list: &str) -> Vec<String> {
    let is_open = |item: &String| behind_scheme(item).is_some_and(|rest| !rest.contains('/'));
    let mut items: Vec<String> = Vec::new();
    for part in list.split(',') {
        match items.last_mut().filter(|last| is_open(last)) {
            Some(last) => {
                last.push(',');
                last.push_str(part);
            }
            None => items.push(part.trim().to_owned()),
        }
    }
    items
}

/// Why a pool's name cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{url} is not etcd://host:port[,host:port...]/cluster: {reason}")]
pub struct BadUrl {
    url: String,
    reason: &'static str,
}

/// The location of a pool in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The endpoints of etcd, `host:port`.
    pub endpoints: Vec<String>,
    /// The name of the cluster.
    pub cluster: String,
}

impl Location {
    /// Whether an address has the scheme `etcd://`, also if the rest is wrong.
    pub fn is_meant_by(address: &str) -> bool {
        behind_scheme(address).is_some()
    }

    /// Reads `etcd://host:port[,host:port...]/cluster`.
    pub fn parse(url: &str) -> Result<Self, BadUrl> {
        let bad = |reason| BadUrl {
            url: url.to_owned(),
            reason,
        };
        let rest = behind_scheme(url).ok_or_else(|| bad("the URL must begin with etcd://"))?;
        let (hosts, cluster) = rest
            .split_once('/')
            .ok_or_else(|| bad("the cluster name is missing"))?;
        if !is_cluster_name(cluster) {
            return Err(bad(
                "the cluster name must be 1 to 64 letters, digits, '.', '_' or '-'",
            ));
        }
        let endpoints: Vec<String> = hosts.split(',').map(str::to_owned).collect();
        let has_port = |endpoint: &String| {
            endpoint
                .rsplit_once(':')
                .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        if !endpoints.iter().all(has_port) {
            return Err(bad("each endpoint must be host:port"));
        }
        Ok(Self {
            endpoints,
            cluster: cluster.to_owned(),
        })
    }

    /// Reads the addresses of the masters from etcd once. `request_timeout` is the timeout for each
    /// endpoint.
    pub async fn masters(&self, request_timeout: Duration) -> Result<Vec<String>, Error> {
        let options = Options {
            request_timeout,
            ..Options::new(self.endpoints.iter().cloned())
        };
        masters(&Client::new(&options)?, &self.cluster).await
    }
}

/// The addresses of the running masters, without repetition. The address of a leader comes first.
pub async fn masters(client: &Client, cluster: &str) -> Result<Vec<String>, Error> {
    let root = root(cluster);
    let read = Txn::new()
        .then(Op::get(Range::key(format!("{root}{LEADER}"))))
        .then(Op::get(Range::prefix(format!("{root}{MEMBERS}"))));
    let found = client.txn_repeatable(read).await?;
    let mut addresses: Vec<String> = Vec::new();
    for address in found
        .read(0)
        .iter()
        .chain(found.read(1))
        .filter_map(address)
    {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    Ok(addresses)
}

/// The address in an announcement. An announcement of a later version that cannot be read is ignored.
fn address(announced: &KeyValue) -> Option<String> {
    let fields: serde_json::Value = serde_json::from_slice(&announced.value).ok()?;
    let address = fields.get("address")?.as_str()?;
    (!address.is_empty()).then(|| address.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_names_endpoints_and_a_cluster() {
        let location = Location::parse("etcd://a:2379,[::1]:23790/prod-1").unwrap();
        assert_eq!(location.endpoints, ["a:2379", "[::1]:23790"]);
        assert_eq!(location.cluster, "prod-1");
        assert_eq!(
            Location::parse("ETCD://a:2379,[::1]:23790/prod-1"),
            Ok(location)
        );
    }

    #[test]
    fn the_items_of_a_list_are_told_apart_from_the_endpoints_of_etcd() {
        assert_eq!(split_list("http://a:1"), ["http://a:1"]);
        assert_eq!(
            split_list("http://a:1, http://b:1"),
            ["http://a:1", "http://b:1"]
        );
        assert_eq!(
            split_list("etcd://a:1,b:1/pool,http://c:1,etcd://d:1/x"),
            ["etcd://a:1,b:1/pool", "http://c:1", "etcd://d:1/x"]
        );
        assert_eq!(
            split_list("etcd://a:1,b:1"),
            ["etcd://a:1,b:1"],
            "whoever parses it says what is amiss"
        );
    }

    #[test]
    fn what_is_no_location_is_refused_with_the_reason() {
        for url in [
            "http://a:1/x",
            "etcd://a:1",
            "etcd://a:1/",
            "etcd://a:1/x/y",
            "etcd://a/x",
            "etcd:///x",
            "etcd://a:1,/x",
            "etcd://a:65536/x",
            "etcd://a:1/a b",
        ] {
            let text = Location::parse(url).unwrap_err().to_string();
            assert!(text.contains(url), "{text}");
        }
    }
}
