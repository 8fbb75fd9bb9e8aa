//! What this machine can do, found with plain code that knows nothing of the pool.
//!
//! They run in two processes of their own, which hold no client: one copies, sends and pings, the
//! other receives and answers. Copies walk through as much memory as the cases that they bound.

mod copy;
mod far;
mod ping;
mod stream;
mod touch;

pub(crate) use copy::{Copies, Shape};
pub(crate) use far::Far;
pub(crate) use ping::Ping;
pub(crate) use stream::Streams;
pub(crate) use touch::first_touch;

/// How a connection to the far process begins: what it is for, and two numbers that go with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Opening {
    purpose: Purpose,
    /// Stream: the bytes of a round. Ping: the bytes of a request.
    first: u64,
    /// Stream: the memory received into, in bytes. Ping: the bytes of an answer.
    second: u64,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Stream,
    Ping,
    /// A ping whose ends poll.
    SpinningPing,
}

/// The bytes of an opening.
const OPENING: usize = 17;

impl Opening {
    fn to_bytes(self) -> [u8; OPENING] {
        let mut bytes = [0; OPENING];
        let (purpose, numbers) = bytes.split_at_mut(1);
        purpose.fill(match self.purpose {
            Purpose::Stream => 0,
            Purpose::Ping => 1,
            Purpose::SpinningPing => 2,
        });
        let (first, second) = numbers.split_at_mut(8);
        first.copy_from_slice(&self.first.to_le_bytes());
        second.copy_from_slice(&self.second.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; OPENING]) -> Option<Self> {
        let (purpose, numbers) = bytes.split_first()?;
        let (first, second) = numbers.split_first_chunk()?;
        Some(Self {
            purpose: match purpose {
                0 => Purpose::Stream,
                1 => Purpose::Ping,
                2 => Purpose::SpinningPing,
                _ => return None,
            },
            first: u64::from_le_bytes(*first),
            second: u64::from_le_bytes(second.try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::window::Window;
    use std::time::Duration;

    #[test]
    fn openings_read_back() {
        for purpose in [Purpose::Stream, Purpose::Ping, Purpose::SpinningPing] {
            let opening = Opening {
                purpose,
                first: 1 << 40,
                second: 7,
            };
            assert_eq!(Opening::from_bytes(opening.to_bytes()), Some(opening));
        }
        assert_eq!(Opening::from_bytes([9; OPENING]), None);
    }

    #[test]
    fn every_limit_runs_against_a_far_end() {
        let far = Far::listen().unwrap();
        for streams in [1, 2] {
            let mut streams = Streams::open(far.port(), streams, 4 << 20, 2 << 20).unwrap();
            let source = vec![1; 2 << 20];
            for _ in 0..3 {
                assert!(streams.round(&source).unwrap() > Duration::ZERO);
            }
        }
        let window = Window {
            at_least: Duration::ZERO,
            calls: 50,
        };
        for spin in [false, true] {
            let mut ping = Ping::open(far.port(), 100, 10, spin).unwrap();
            assert_eq!(ping.run(window).unwrap().calls(), 50, "a burst is timed");
        }
        assert!(first_touch(1 << 20) > Duration::ZERO);
    }
}
