//! The address that a daemon tells others to reach it at.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// An address for peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advertised {
    /// `HOST:PORT`, the host an IP address (IPv6 in brackets) or a name.
    pub address: String,
    /// Whether only peers on this host can use it.
    pub loopback_only: bool,
}

impl Advertised {
    /// The address for peers of another port of this daemon, which listens at `listen`. An unspecified address
    /// (0.0.0.0, ::) gets the advertised host.
    pub fn beside(&self, listen: SocketAddr) -> String {
        match self.address.rsplit_once(':') {
            Some((host, _)) if listen.ip().to_canonical().is_unspecified() => {
                format!("{host}:{}", listen.port())
            }
            _ => listen.to_string(),
        }
    }
}

impl fmt::Display for Advertised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

/// Why a daemon has no address for peers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdvertiseError {
    /// The daemon listens on every interface, and does not know which of its addresses peers can
    /// reach.
    #[error(
        "{listen} means every interface, and no peer can connect to that: pass \
         --advertise HOST:PORT with the address or name by which others reach this host"
    )]
    Unspecified {
        /// The unspecified address.
        listen: SocketAddr,
    },
    /// The value of `--advertise` is not an address.
    #[error("--advertise `{given}`: {reason}; write HOST:PORT or HOST")]
    Unparsable {
        /// The value.
        given: String,
        /// Why the value is not an address.
        reason: &'static str,
    },
}

/// Chooses the address for peers. `advertise` is `HOST:PORT`, or `HOST` with the port of `listen`.
/// Without `advertise` the address is `listen`, to which the listener is bound.
///
/// Fails for an unspecified address (0.0.0.0, ::). A loopback address is accepted and marked.
pub fn decide(advertise: Option<&str>, listen: SocketAddr) -> Result<Advertised, AdvertiseError> {
    match advertise {
        None => from_ip(listen),
        Some(given) => from_text(given, listen.port()),
    }
}

fn from_ip(addr: SocketAddr) -> Result<Advertised, AdvertiseError> {
    let ip = addr.ip().to_canonical();
    if ip.is_unspecified() {
        return Err(AdvertiseError::Unspecified { listen: addr });
    }
    Ok(Advertised {
        address: addr.to_string(),
        loopback_only: ip.is_loopback(),
    })
}

fn from_text(given: &str, port: u16) -> Result<Advertised, AdvertiseError> {
    let unparsable = |reason| AdvertiseError::Unparsable {
        given: given.to_owned(),
        reason,
    };
    if let Ok(addr) = given.parse::<SocketAddr>() {
        return match addr.port() {
            0 => Err(unparsable("no peer can connect to port 0")),
            _ => from_ip(addr),
        };
    }
    let bare = given
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(given);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return from_ip(SocketAddr::new(ip, port));
    }
    let (host, port) = match given.rsplit_once(':') {
        None => (given, port),
        Some((host, port)) => match port.parse() {
            Err(_) => return Err(unparsable("the text after the colon is not a port")),
            Ok(0) => return Err(unparsable("no peer can connect to port 0")),
            Ok(port) => (host, port),
        },
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    if host.is_empty() || !host.chars().all(is_name) {
        return Err(unparsable("the host is neither a name nor an IP address"));
    }
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    Ok(Advertised {
        address: format!("{host}:{port}"),
        loopback_only: name == "localhost" || name.ends_with(".localhost"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listening_on(listen: &str, advertise: Option<&str>) -> Result<Advertised, AdvertiseError> {
        decide(advertise, listen.parse().unwrap())
    }

    #[test]
    fn every_interface_is_no_address_for_peers() {
        for listen in ["0.0.0.0:7", "[::]:7", "[::ffff:0.0.0.0]:7"] {
            let error = listening_on(listen, None).unwrap_err();
            assert!(matches!(error, AdvertiseError::Unspecified { .. }));
            assert!(error.to_string().contains("--advertise"));
            listening_on(listen, Some("10.0.0.1:7")).unwrap();
        }
        for advertise in ["0.0.0.0:7", "0.0.0.0", "[::]:7", "::"] {
            let error = listening_on("10.0.0.1:7", Some(advertise)).unwrap_err();
            assert!(matches!(error, AdvertiseError::Unspecified { .. }));
        }
    }

    #[test]
    fn the_flag_covers_the_listener_and_takes_its_port_where_it_has_none() {
        for (advertise, address) in [
            (None, "10.0.0.1:7"),
            (Some("10.0.0.2:8"), "10.0.0.2:8"),
            (Some("10.0.0.2"), "10.0.0.2:7"),
            (Some("node-3.pool"), "node-3.pool:7"),
            (Some("node-3.pool:8"), "node-3.pool:8"),
            (Some("fd00::1"), "[fd00::1]:7"),
            (Some("[fd00::1]"), "[fd00::1]:7"),
            (Some("[fd00::1]:8"), "[fd00::1]:8"),
        ] {
            let advertised = listening_on("10.0.0.1:7", advertise).unwrap();
            assert_eq!(advertised.address, address);
            assert!(!advertised.loopback_only, "{address}");
        }
    }

    #[test]
    fn loopback_is_taken_and_flagged() {
        for advertise in [
            "127.0.0.1:7",
            "127.9.9.9",
            "[::1]:7",
            "localhost",
            "LocalHost.:7",
        ] {
            let advertised = listening_on("0.0.0.0:7", Some(advertise)).unwrap();
            assert!(advertised.loopback_only, "{advertise}");
        }
        assert!(listening_on("127.0.0.1:7", None).unwrap().loopback_only);
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for advertise in [
            "",
            ":7",
            "host:",
            "host:0",
            "10.0.0.1:0",
            "a b:7",
            "host:70000",
            "http://h:7",
        ] {
            let error = listening_on("10.0.0.1:7", Some(advertise)).unwrap_err();
            assert!(
                matches!(error, AdvertiseError::Unparsable { .. }),
                "{advertise}: {error}"
            );
        }
    }

    #[test]
    fn another_port_on_every_interface_is_told_at_the_same_host() {
        for (advertise, listen, told) in [
            ("10.0.0.1:7", "0.0.0.0:8", "10.0.0.1:8"),
            ("host.example", "[::]:8", "host.example:8"),
            ("[2001:db8::1]:7", "[::]:8", "[2001:db8::1]:8"),
            ("10.0.0.1:7", "127.0.0.1:8", "127.0.0.1:8"),
        ] {
            let advertised = listening_on("0.0.0.0:7", Some(advertise)).unwrap();
            assert_eq!(advertised.beside(listen.parse().unwrap()), told);
        }
    }
}
