//! Checks whether a node that only its own host can reach could serve the pool.

use kvpool_etcd::discover::Location;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Uri;

/// The time limit for resolving all names together.
const RESOLVE: Duration = Duration::from_secs(2);

/// The first of `masters` whose address, or whose etcd's address, is not loopback. A name that is not
/// resolved in time counts as loopback.
pub(crate) async fn elsewhere(masters: &[String]) -> Option<&str> {
    let look = async {
        for master in masters {
            for host in hosts(master) {
                if is_elsewhere(&host).await {
                    return Some(master.as_str());
                }
            }
        }
        None
    };
    timeout(RESOLVE, look).await.ok().flatten()
}

fn hosts(master: &str) -> Vec<String> {
    if let Ok(location) = Location::parse(master) {
        let endpoints = location.endpoints.iter();
        let named = endpoints.filter_map(|endpoint| endpoint.rsplit_once(':'));
        return named.map(|(host, _)| host.to_owned()).collect();
    }
    let uri = master.parse::<Uri>().ok();
    let host = uri.as_ref().and_then(Uri::host);
    host.into_iter().map(str::to_owned).collect()
}

async fn is_elsewhere(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    let Ok(mut addresses) = tokio::net::lookup_host((host, 0)).await else {
        return false;
    };
    addresses.any(|address| {
        let ip = address.ip().to_canonical();
        !ip.is_loopback() && !ip.is_unspecified()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_addresses_beyond_loopback_are_elsewhere() {
        for master in [
            "http://127.0.0.1:7070",
            "http://[::1]:7070",
            "http://0.0.0.0:7070",
            "http://localhost:7070",
            "http://no-such-host.invalid:7070",
            "etcd://127.0.0.1:2379,localhost:2379/pool",
        ] {
            assert_eq!(elsewhere(&[master.into()]).await, None, "{master}");
        }
        for master in [
            "http://192.0.2.1:7070",
            "http://[2001:db8::1]:7070",
            "etcd://127.0.0.1:2379,192.0.2.1:2379/pool",
        ] {
            let masters = ["http://127.0.0.1:1".to_owned(), master.to_owned()];
            assert_eq!(elsewhere(&masters).await, Some(master));
        }
    }
}
