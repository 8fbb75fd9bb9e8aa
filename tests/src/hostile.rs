//! Hostile callers: many, slow, and silent.

use anyhow::Context;
use kvpool_types::Epoch;
use kvpool_types::wire::frame::{Header, Op, VERSION};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The bytes that a caller sends before it stops sending.
pub type Words = Vec<u8>;

/// The bytes that callers of a framed port send, with `op` in the first frame. Some callers send
/// nothing, some a part of a header, some a header that announces 4 MiB with the first of these
/// bytes.
pub fn framed(op: Op) -> Vec<Words> {
    let head = |meta| {
        let header = Header {
            version: VERSION,
            op,
            request: 1,
            epoch: Epoch(0),
            meta,
            payload: 0,
        };
        header.encode().to_vec()
    };
    let mut large = head(4 << 20);
    large.extend_from_slice(&[0; 64]);
    vec![Words::new(), b"KVP1\x01\x00".to_vec(), head(4096), large]
}

/// The bytes that callers of a gRPC port send: the preface, and settings without any call.
pub fn grpc() -> Vec<Words> {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let mut settings = preface.clone();
    settings.extend_from_slice(&[0, 0, 0, 4, 0, 0, 0, 0, 0]);
    vec![b"PRI".to_vec(), preface, settings]
}

/// The bytes that callers of an HTTP port send: parts of a request.
pub fn http() -> Vec<Words> {
    vec![
        Words::new(),
        b"GET /metr".to_vec(),
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n".to_vec(),
    ]
}

/// Connections that stay open and send a byte now and then. Dropping it closes them.
#[derive(Debug)]
pub struct Crowd {
    over: Arc<AtomicBool>,
    trickle: Option<JoinHandle<()>>,
}

enum Line {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Line {
    fn say(&mut self, words: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.write_all(words),
            Self::Unix(stream) => stream.write_all(words),
        }
    }
}

impl Crowd {
    /// Opens `count` connections to `address`, which send the entries of `words` in turn.
    pub fn of(address: &str, count: usize, words: &[Words]) -> anyhow::Result<Self> {
        Self::gather(count, words, || {
            let stream = TcpStream::connect(address).with_context(|| format!("call {address}"))?;
            stream.set_write_timeout(Some(Duration::from_secs(1)))?;
            Ok(Line::Tcp(stream))
        })
    }

    /// [`Crowd::of`] for a Unix socket.
    pub fn of_unix(path: &Path, count: usize, words: &[Words]) -> anyhow::Result<Self> {
        Self::gather(count, words, || {
            let stream = UnixStream::connect(path)?;
            stream.set_write_timeout(Some(Duration::from_secs(1)))?;
            Ok(Line::Unix(stream))
        })
    }

    fn gather(
        count: usize,
        words: &[Words],
        call: impl Fn() -> anyhow::Result<Line>,
    ) -> anyhow::Result<Self> {
        let mut lines = Vec::with_capacity(count);
        for words in words.iter().cycle().take(count) {
            let mut line = call()?;
            // The daemon may have closed the connection in favour of a later one.
            let _told = line.say(words);
            lines.push((line, words.is_empty()));
        }
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        let trickle = std::thread::spawn(move || {
            while !told.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(100));
                for (line, is_silent) in lines.iter_mut().take(200) {
                    if !*is_silent {
                        let _told = line.say(&[0]);
                    }
                }
            }
        });
        Ok(Self {
            over,
            trickle: Some(trickle),
        })
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(trickle) = self.trickle.take() {
            let _ended = trickle.join();
        }
    }
}

/// Raises this process's limit of open descriptors as far as possible, and returns it.
pub fn raise_descriptor_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, current } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => maximum.unwrap_or(u64::MAX),
        Err(_) => current.unwrap_or(1024),
    }
}
