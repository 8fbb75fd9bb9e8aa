//! How fast bytes go through a bare TCP connection over loopback.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What one call sends or receives at most.
const CALL: usize = 1 << 20;

/// A connection whose far end, a thread, receives all that is sent and confirms each round.
#[derive(Debug)]
pub(crate) struct Stream {
    sender: Option<TcpStream>,
    receiver: Option<JoinHandle<io::Result<()>>>,
    bytes: u64,
}

impl Stream {
    /// Opens a connection for rounds of `bytes`.
    pub(crate) fn open(bytes: u64) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let sender = TcpStream::connect(listener.local_addr()?)?;
        let (mut socket, _) = listener.accept()?;
        sender.set_nodelay(true)?;
        let receiver = std::thread::spawn(move || {
            let mut buffer = vec![0; CALL];
            let mut left = bytes;
            loop {
                let got = socket.read(&mut buffer)? as u64;
                if got == 0 {
                    return Ok(());
                }
                left = left.saturating_sub(got);
                if left == 0 {
                    socket.write_all(&[1])?;
                    left = bytes;
                }
            }
        });
        Ok(Self {
            sender: Some(sender),
            receiver: Some(receiver),
            bytes,
        })
    }

    /// Sends one round and returns the time until all of it was received.
    pub(crate) fn run(&mut self) -> io::Result<Duration> {
        let Some(socket) = &mut self.sender else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let data = vec![0x5a; CALL];
        let begin = Instant::now();
        let mut left = self.bytes;
        while left > 0 {
            let part = usize::try_from(left).map_or(CALL, |left| left.min(CALL));
            socket.write_all(&data[..part])?;
            left -= part as u64;
        }
        socket.read_exact(&mut [0])?;
        Ok(begin.elapsed())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The end of the stream lets the receiver return.
        self.sender = None;
        if let Some(receiver) = self.receiver.take() {
            let _ = receiver.join();
        }
    }
}
