//! Bare TCP over loopback, from memory to memory: the limit of a hand-off.

use anyhow::anyhow;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Memory that streams write, and the memory that they read it into.
pub(super) struct BareTcp {
    source: Vec<u8>,
    target: Vec<u8>,
    /// How often the memory goes.
    times: u32,
    streams: usize,
}

impl BareTcp {
    pub(super) fn new(length: usize, times: u32, streams: usize) -> Self {
        Self {
            source: vec![1; length],
            target: vec![2; length],
            times,
            streams,
        }
    }

    /// The time of all bytes. Each stream has a part of the memory, a thread that writes and one that reads.
    pub(super) fn measure(&mut self) -> anyhow::Result<Duration> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let length = self.source.len().div_ceil(self.streams);
        let parts = self
            .source
            .chunks(length)
            .zip(self.target.chunks_mut(length));
        let pairs = parts.map(|part| Ok((connect(&listener)?, part)));
        let pairs = pairs.collect::<io::Result<Vec<_>>>()?;
        let times = self.times;
        let begin = Instant::now();
        thread::scope(|scope| -> anyhow::Result<()> {
            let mut threads = Vec::new();
            for ((mut here, mut there), (source, target)) in pairs {
                let write = move || (0..times).try_for_each(|_| here.write_all(source));
                let read = move || (0..times).try_for_each(|_| there.read_exact(target));
                threads.push(thread::Builder::new().spawn_scoped(scope, write)?);
                threads.push(thread::Builder::new().spawn_scoped(scope, read)?);
            }
            // A thread that fails drops its end of the stream, so that the thread at the other end fails too.
            for thread in threads {
                let moved = thread.join();
                moved.map_err(|_| anyhow!("a thread of a stream panicked"))??;
            }
            Ok(())
        })?;
        Ok(begin.elapsed())
    }
}

/// The two ends of one stream.
fn connect(listener: &TcpListener) -> io::Result<(TcpStream, TcpStream)> {
    let here = TcpStream::connect(listener.local_addr()?)?;
    loop {
        let (there, from) = listener.accept()?;
        // Any process of this host may connect.
        if from == here.local_addr()? {
            return Ok((here, there));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_goes_whatever_the_number_of_streams() {
        for streams in [1, 2, 3, 64] {
            let mut tcp = BareTcp::new(1 << 16, 3, streams);
            tcp.measure().unwrap();
            assert!(tcp.target == tcp.source, "{streams} streams");
        }
    }
}
