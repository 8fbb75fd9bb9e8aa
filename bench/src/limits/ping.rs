//! Round trips over a bare TCP connection to another process.

use super::core::pin;
use super::{Opening, Purpose};
use crate::window::{Meter, Window};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The time for which a spinning end polls before it sleeps. An idle end must leave its core to others.
const POLL_TIME: Duration = Duration::from_micros(500);

/// Round trips between two polls of the window's clock.
const BURST: usize = 50;

/// A connection to the far process.
#[derive(Debug)]
pub(crate) struct Ping {
    end: End,
    request: Vec<u8>,
    answer: Vec<u8>,
}

/// One end of the connection.
#[derive(Debug)]
struct End {
    socket: TcpStream,
    spin: bool,
    /// Whether calls on the socket return at once.
    polls: bool,
}

impl Ping {
    /// Opens a connection for requests and answers of these sizes, each at least one byte. On two cores the
    /// ends resemble a busy client and a busy server. On one core no idle core has to wake.
    pub(crate) fn open(
        far: SocketAddr,
        request: u64,
        answer: u64,
        spin: bool,
        one_core: bool,
    ) -> io::Result<Self> {
        let mut socket = TcpStream::connect(far)?;
        socket.set_nodelay(true)?;
        let opening = Opening {
            purpose: if spin {
                Purpose::SpinningPing
            } else {
                Purpose::Ping
            },
            first: request,
            second: answer,
            core: Some(u64::from(!one_core)),
        };
        socket.write_all(&opening.to_bytes())?;
        Ok(Self {
            end: End::new(socket, spin),
            request: memory(request),
            answer: memory(answer),
        })
    }

    /// Round trips for one window. A call of the window is [`BURST`] round trips.
    pub(crate) fn run(&mut self, window: Window) -> io::Result<Meter> {
        let mut meter = Meter::default();
        let _pinned = pin(0);
        for _ in 0..window.calls.max(1) {
            for _ in 0..BURST {
                let begin = Instant::now();
                self.end.send(&self.request)?;
                if !self.end.receive(&mut self.answer)? {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
                meter.add(begin.elapsed(), 1);
            }
            if meter.spent() >= window.at_least {
                break;
            }
        }
        Ok(meter)
    }
}

/// The far end: answers requests until the connection ends.
pub(super) fn answer(socket: TcpStream, opening: Opening) -> io::Result<()> {
    let mut end = End::new(socket, opening.purpose == Purpose::SpinningPing);
    let mut request = memory(opening.first);
    let answer = memory(opening.second);
    while end.receive(&mut request)? {
        end.send(&answer)?;
    }
    Ok(())
}

fn memory(bytes: u64) -> Vec<u8> {
    vec![1; usize::try_from(bytes).unwrap_or(1).max(1)]
}

impl End {
    const fn new(socket: TcpStream, spin: bool) -> Self {
        Self {
            socket,
            spin,
            polls: false,
        }
    }

    fn set_polls(&mut self, polls: bool) -> io::Result<()> {
        if self.polls != polls {
            self.socket.set_nonblocking(polls)?;
            self.polls = polls;
        }
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        if !self.spin {
            return self.socket.write_all(bytes);
        }
        let mut left = bytes;
        while !left.is_empty() {
            match self.socket.write(left) {
                Ok(count) => left = left.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fills `bytes`. Returns false if the connection ended before the first byte.
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<bool> {
        if self.spin {
            return self.poll(bytes);
        }
        match self.socket.read_exact(bytes) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn poll(&mut self, bytes: &mut [u8]) -> io::Result<bool> {
        self.set_polls(true)?;
        let mut filled = 0;
        let begin = Instant::now();
        let mut polls = 0u32;
        loop {
            let Some(room) = bytes.get_mut(filled..).filter(|room| !room.is_empty()) else {
                return Ok(true);
            };
            match self.socket.read(room) {
                Ok(0) => return Ok(false),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    polls = polls.wrapping_add(1);
                    if polls.is_multiple_of(64) && begin.elapsed() > POLL_TIME {
                        self.set_polls(false)?;
                    }
                    std::hint::spin_loop();
                }
                Err(error) => return Err(error),
            }
        }
    }
}
