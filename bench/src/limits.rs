//! The limits of this machine, measured with plain code without a pool.
//!
//! The limits run in two processes without a client. One copies, sends and pings; the other receives and
//! answers. Copies cycle through as much memory as the cases.

mod copy;
mod core;
mod far;
mod flush;
mod ping;
mod stream;
pub(crate) mod tls;
mod touch;

pub(crate) use copy::{Copies, Shape};
pub(crate) use far::Far;
pub(crate) use flush::Flush;
pub(crate) use ping::Ping;
pub(crate) use stream::{Plan, Streams};
pub(crate) use touch::first_touch;

/// The first message of a connection to the far process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Opening {
    purpose: Purpose,
    /// Stream: the bytes of a round. Ping: the bytes of a request.
    first: u64,
    /// Stream: the bytes of memory at the receiver. Ping: the bytes of an answer.
    second: u64,
    /// The core of its far end.
    core: Option<u64>,
}

/// The use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Stream,
    /// A stream that rustls encrypts.
    TlsStream,
    Ping,
    /// A ping whose ends poll.
    SpinningPing,
}

/// The length of an opening, in bytes.
const OPENING: usize = 25;

/// Stands for no core.
const ANY_CORE: u64 = u64::MAX;

impl Opening {
    fn to_bytes(self) -> [u8; OPENING] {
        let mut bytes = [0; OPENING];
        let (purpose, numbers) = bytes.split_at_mut(1);
        purpose.fill(match self.purpose {
            Purpose::Stream => 0,
            Purpose::Ping => 1,
            Purpose::SpinningPing => 2,
            Purpose::TlsStream => 3,
        });
        let values = [self.first, self.second, self.core.unwrap_or(ANY_CORE)];
        for (number, value) in numbers.chunks_exact_mut(8).zip(values) {
            number.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: [u8; OPENING]) -> Option<Self> {
        let (purpose, numbers) = bytes.split_first()?;
        let (first, rest) = numbers.split_first_chunk()?;
        let (second, core) = rest.split_first_chunk()?;
        let core = u64::from_le_bytes(core.try_into().ok()?);
        Some(Self {
            purpose: match purpose {
                0 => Purpose::Stream,
                1 => Purpose::Ping,
                2 => Purpose::SpinningPing,
                3 => Purpose::TlsStream,
                _ => return None,
            },
            first: u64::from_le_bytes(*first),
            second: u64::from_le_bytes(*second),
            core: (core != ANY_CORE).then_some(core),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::security::Material;
    use crate::window::Window;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    #[test]
    fn openings_read_back() {
        for (purpose, core) in [
            (Purpose::Stream, None),
            (Purpose::Ping, Some(0)),
            (Purpose::SpinningPing, Some(1)),
            (Purpose::TlsStream, None),
        ] {
            let opening = Opening {
                purpose,
                first: 1 << 40,
                second: 7,
                core,
            };
            assert_eq!(Opening::from_bytes(opening.to_bytes()), Some(opening));
        }
        assert_eq!(Opening::from_bytes([9; OPENING]), None);
    }

    #[test]
    fn every_limit_runs_against_a_far_end() {
        let directory = tempfile::tempdir().unwrap();
        let material = Material::make(directory.path()).unwrap();
        let (cert, key) = material.pair();
        let server = tls::server(&cert, &key).unwrap();
        let client = tls::client(&material.ca()).unwrap();
        let far = Far::listen(Ipv4Addr::LOCALHOST.into(), server).unwrap();
        for (count, pinned, encrypts) in [
            (1, false, false),
            (2, false, false),
            (2, true, false),
            (1, false, true),
            (2, false, true),
        ] {
            let plan = Plan {
                count,
                pinned,
                tls: encrypts.then_some(&client),
                bytes: 4 << 20,
                span: 2 << 20,
            };
            let mut streams = Streams::open(far.address(), &plan).unwrap();
            let source = vec![1; 2 << 20];
            for _ in 0..3 {
                assert!(streams.round(&source).unwrap() > Duration::ZERO);
            }
        }
        let window = Window {
            at_least: Duration::ZERO,
            calls: 50,
        };
        for (spin, one_core) in [(false, false), (false, true), (true, false)] {
            let mut ping = Ping::open(far.address(), 100, 10, spin, one_core).unwrap();
            assert_eq!(ping.run(window).unwrap().calls(), 50, "a burst is timed");
        }
        assert!(first_touch(1 << 20) > Duration::ZERO);
    }
}
