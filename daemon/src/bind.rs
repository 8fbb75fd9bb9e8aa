//! Binds listening sockets. Its errors name the remedy.

use parking_lot::Mutex;
use std::io;
use std::net::SocketAddr;
use tokio::net::TcpListener;

/// Why a daemon cannot listen where it was told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The text is not an address.
    #[error(
        "`{addr}` is not an address for {what}: {reason}; write HOST:PORT, for example 127.0.0.1:9000, \
         or 0.0.0.0:9000 for every interface"
    )]
    Unparsable {
        /// The port, as messages name it.
        what: String,
        /// The text.
        addr: String,
        /// Why the text is not an address.
        reason: String,
    },
    /// Another process listens on the address.
    #[error(
        "{addr} is in use, {what} cannot listen on it: stop the process that listens there (`ss -ltnp` shows it) \
         or choose another port"
    )]
    InUse {
        /// The port, as messages name it.
        what: String,
        /// The address.
        addr: SocketAddr,
    },
    /// The process has no permission to listen on the address.
    #[error(
        "no permission to listen on {addr} for {what}: ports below 1024 need privileges; choose a \
         higher one"
    )]
    NotPermitted {
        /// The port, as messages name it.
        what: String,
        /// The address.
        addr: SocketAddr,
    },
    /// The address belongs to another machine.
    #[error(
        "{addr} is not an address of this host, {what} cannot listen on it: choose one that `ip addr` \
         shows, and tell others a different one with --advertise"
    )]
    NotLocal {
        /// The port, as messages name it.
        what: String,
        /// The address.
        addr: SocketAddr,
    },
    /// The system refused for another reason.
    #[error("cannot listen on {addr} for {what}: {source}")]
    Other {
        /// The port, as messages name it.
        what: String,
        /// The address.
        addr: SocketAddr,
        /// The error of the system.
        source: io::Error,
    },
}

/// Listens on `addr`, which is `IP:PORT` or `NAME:PORT`; port 0 lets the system choose one. `what`
/// names the port in errors: "the gRPC port".
pub async fn bind(addr: &str, what: &str) -> Result<TcpListener, BindError> {
    let addr = resolve(addr, what).await?;
    TcpListener::bind(addr).await.map_err(|source| {
        let what = what.to_owned();
        match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { what, addr },
            io::ErrorKind::PermissionDenied => BindError::NotPermitted { what, addr },
            io::ErrorKind::AddrNotAvailable => BindError::NotLocal { what, addr },
            _ => BindError::Other { what, addr, source },
        }
    })
}

async fn resolve(addr: &str, what: &str) -> Result<SocketAddr, BindError> {
    if let Ok(addr) = addr.parse() {
        return Ok(addr);
    }
    let unparsable = |reason: String| BindError::Unparsable {
        what: what.to_owned(),
        addr: addr.to_owned(),
        reason,
    };
    let (host, port) = addr
        .rsplit_once(':')
        .ok_or_else(|| unparsable("it has no port".into()))?;
    if port.parse::<u16>().is_err() {
        return Err(unparsable(format!("`{port}` is not a port")));
    }
    if host.is_empty() {
        return Err(unparsable("it has no host".into()));
    }
    if host.contains([':', '[', ']']) {
        return Err(unparsable(format!(
            "`{host}` is not an IPv6 address in brackets"
        )));
    }
    tokio::net::lookup_host(addr)
        .await
        .map_err(|error| unparsable(format!("cannot resolve `{host}` ({error})")))?
        .next()
        .ok_or_else(|| unparsable(format!("`{host}` has no address")))
}

/// How the ports of a daemon are guarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guards {
    /// The ports speak TLS.
    pub tls: bool,
    /// Callers must show a token.
    pub tokens: bool,
}

/// A port is open to other hosts, and nothing guards it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} listens on {addr}, beyond loopback, without TLS and without tokens: anyone who reaches it can use the \
     pool. Pass --tls-cert and --tls-key, or listen on 127.0.0.1; on a network that you trust, pass --insecure"
)]
pub struct Exposed {
    /// The port, as errors name it.
    pub what: &'static str,
    /// Where it listens.
    pub addr: SocketAddr,
}

/// Judges where the ports of a daemon listen. A port on loopback needs no guard. A port beyond loopback needs TLS or
/// tokens, and `insecure` allows it without both. A warning names each risk that is left. A process that runs several
/// daemons warns once for each combination of guards.
///
/// # Errors
///
/// [`Exposed`] for the first port that nothing guards.
pub fn refuse_if_exposed(
    ports: &[(&'static str, SocketAddr, Guards)],
    insecure: bool,
) -> Result<(), Exposed> {
    static WARNED: Mutex<Vec<Guards>> = Mutex::new(Vec::new());
    judge(ports, insecure, &WARNED)
}

/// [`refuse_if_exposed`], without a warning for guards in `warned`.
fn judge(
    ports: &[(&'static str, SocketAddr, Guards)],
    insecure: bool,
    warned: &Mutex<Vec<Guards>>,
) -> Result<(), Exposed> {
    let is_exposed = |addr: &SocketAddr| !addr.ip().to_canonical().is_loopback();
    for &(what, addr, guards) in ports.iter().filter(|(_, addr, _)| is_exposed(addr)) {
        if !(guards.tls || guards.tokens || insecure) {
            return Err(Exposed { what, addr });
        }
        let mut warned = warned.lock();
        if warned.contains(&guards) {
            continue;
        }
        warned.push(guards);
        match (guards.tls, guards.tokens) {
            (true, true) => {}
            (true, false) => tracing::warn!(
                %addr,
                "{what}: callers from other hosts are not identified, so anyone who reaches this port can use \
                 it; set --auth-jwks, or for the pool's own port --tls-client-auth all"
            ),
            (false, true) => tracing::warn!(
                %addr,
                "{what} listens beyond loopback without TLS: tokens and blocks can be read on the way"
            ),
            (false, false) => tracing::warn!(
                %addr,
                "--insecure: {what} listens beyond loopback without TLS and without tokens: anyone who reaches \
                 it can use the pool"
            ),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[tokio::test]
    async fn a_port_in_use_is_named_with_its_purpose_and_the_remedy() {
        let first = bind("127.0.0.1:0", "the gRPC port").await.unwrap();
        let addr = first.local_addr().unwrap();
        let error = bind(&addr.to_string(), "the probe port").await.unwrap_err();
        assert!(matches!(&error, BindError::InUse { addr: a, .. } if *a == addr));
        let message = error.to_string();
        for part in [&addr.to_string(), "the probe port", "choose another port"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[tokio::test]
    async fn what_is_no_address_is_refused() {
        for addr in [
            "",
            "9000",
            ":9000",
            "127.0.0.1",
            "127.0.0.1:",
            "127.0.0.1:65536",
            "127.0.0.1:http",
            "::1:9000:x",
            "fe80::1%:80",
        ] {
            let error = bind(addr, "the data port").await.unwrap_err();
            assert!(
                matches!(error, BindError::Unparsable { .. }),
                "{addr}: {error}"
            );
            assert!(error.to_string().contains("the data port"));
        }
    }

    #[tokio::test]
    async fn names_and_ipv6_are_addresses() {
        let listener = bind("localhost:0", "the data port").await.unwrap();
        assert!(listener.local_addr().unwrap().ip().is_loopback());
        assert!(resolve("[::1]:80", "it").await.unwrap().is_ipv6());
    }

    #[tokio::test]
    async fn a_port_on_every_ipv6_interface_takes_ipv4_too() {
        let listener = match bind("[::]:0", "the data port").await {
            Ok(listener) => listener,
            Err(error) => {
                eprintln!("SKIPPED a_port_on_every_ipv6_interface_takes_ipv4_too: {error}");
                return;
            }
        };
        let port = listener.local_addr().unwrap().port();
        let caller = tokio::net::TcpStream::connect(("127.0.0.1", port));
        let (_, (_, from)) = tokio::try_join!(caller, listener.accept()).unwrap();
        assert!(from.ip().to_canonical().is_ipv4(), "{from}");
    }

    #[tokio::test]
    async fn an_address_of_another_host_is_refused() {
        // 192.0.2.0/24 is reserved for documentation and on no host.
        let error = bind("192.0.2.1:0", "the data port").await.unwrap_err();
        assert!(matches!(error, BindError::NotLocal { .. }), "{error}");
    }

    #[test]
    fn a_process_warns_once_of_each_lack_of_guards() {
        #[derive(Clone, Default)]
        struct Lines(Arc<Mutex<Vec<u8>>>);

        impl io::Write for Lines {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().extend_from_slice(bytes);
                Ok(bytes.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        let tls = Guards {
            tls: true,
            tokens: false,
        };
        let ports: [(&str, SocketAddr, Guards); 3] = [
            ("the gRPC port", "0.0.0.0:1".parse().unwrap(), tls),
            (
                "the data port",
                "0.0.0.0:2".parse().unwrap(),
                Guards::default(),
            ),
            ("the HTTP port", "0.0.0.0:3".parse().unwrap(), tls),
        ];
        let warned = Mutex::new(Vec::new());
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..3 {
                judge(&ports, true, &warned).unwrap();
            }
        });
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        let count = |part: &str| text.matches(part).count();
        assert_eq!(
            count("callers from other hosts are not identified"),
            1,
            "{text}"
        );
        assert_eq!(count("without TLS and without tokens"), 1, "{text}");
    }

    #[test]
    fn what_is_open_to_others_needs_a_guard_or_the_word_insecure() {
        let none = Guards::default();
        let tls = Guards { tls: true, ..none };
        let tokens = Guards {
            tokens: true,
            ..none
        };
        let refused = |addr: &str, guards, insecure| {
            let ports = [
                ("the HTTP port", "127.0.0.1:1".parse().unwrap(), none),
                ("the gRPC port", addr.parse().unwrap(), guards),
            ];
            refuse_if_exposed(&ports, insecure).is_err()
        };
        for (addr, is_open) in [
            ("127.0.0.1:1", false),
            ("[::1]:1", false),
            ("[::ffff:127.0.0.1]:1", false),
            ("0.0.0.0:1", true),
            ("[::]:1", true),
            ("10.0.0.1:1", true),
        ] {
            assert_eq!(refused(addr, none, false), is_open, "{addr}");
            assert!(!refused(addr, none, true), "{addr}");
            assert!(!refused(addr, tls, false), "{addr}");
            assert!(!refused(addr, tokens, false), "{addr}");
        }
        // Every port needs a guard of its own.
        let ports = [
            ("the data port", "0.0.0.0:2".parse().unwrap(), tls),
            ("the gRPC port", "0.0.0.0:1".parse().unwrap(), none),
        ];
        let said = refuse_if_exposed(&ports, false).unwrap_err().to_string();
        for part in ["the gRPC port", "0.0.0.0:1", "--tls-cert", "--insecure"] {
            assert!(said.contains(part), "{said}");
        }
    }
}
