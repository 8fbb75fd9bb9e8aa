//! The machine's limits. Memory and connections are kept between two windows.

use super::protocol::Limit;
use crate::limits::{Copies, Flush, Ping, Plan, Streams, first_touch};
use crate::window::Meter;
use anyhow::{Context as _, bail};
use kvpool_tls::rustls::ClientConfig;
use std::net::SocketAddr;
use std::sync::Arc;

/// The memory and connections of the limits.
#[derive(Debug)]
pub(super) struct Yardstick {
    span: u64,
    far: SocketAddr,
    tls: Arc<ClientConfig>,
    copies: Option<Copies>,
    streams: Option<(Limit, Streams)>,
    /// Several kinds of pings take turns.
    pings: Vec<((u64, u64, bool, bool), Ping)>,
    flush: Option<Flush>,
}

impl Yardstick {
    /// Nothing is allocated before its first use.
    pub(super) const fn new(span: u64, far: SocketAddr, tls: Arc<ClientConfig>) -> Self {
        Self {
            span,
            far,
            tls,
            copies: None,
            streams: None,
            pings: Vec::new(),
            flush: None,
        }
    }

    /// Prepares the memory and connections of a limit.
    pub(super) fn prepare(&mut self, limit: Limit) -> anyhow::Result<()> {
        match limit {
            Limit::Copy { .. } => {
                self.copies.get_or_insert_with(|| Copies::new(self.span));
            }
            Limit::Stream {
                streams,
                pinned,
                tls,
                bytes,
            } => {
                self.copies.get_or_insert_with(|| Copies::new(self.span));
                if self.streams.as_ref().is_none_or(|(of, _)| *of != limit) {
                    // The old streams close first, so the far end frees their memory.
                    self.streams = None;
                    let plan = Plan {
                        count: streams,
                        pinned,
                        tls: tls.then_some(&self.tls),
                        bytes,
                        span: self.span,
                    };
                    let opened = Streams::open(self.far, &plan)
                        .context("cannot open a bare TCP connection")?;
                    self.streams = Some((limit, opened));
                }
            }
            Limit::Ping {
                request,
                answer,
                spin,
                one_core,
                ..
            } => {
                let kind = (request, answer, spin, one_core);
                if !self.pings.iter().any(|(of, _)| *of == kind) {
                    let ping = Ping::open(self.far, request, answer, spin, one_core)
                        .context("cannot open a bare TCP connection")?;
                    self.pings.push((kind, ping));
                }
            }
            Limit::Touch { .. } => {}
            Limit::Flush { .. } => {
                if self.flush.is_none() {
                    let made = Flush::new().context("cannot create the file to flush")?;
                    self.flush = Some(made);
                }
            }
        }
        Ok(())
    }

    /// Runs the limit once.
    pub(super) fn run(&mut self, limit: Limit) -> anyhow::Result<Meter> {
        let mut meter = Meter::default();
        match limit {
            Limit::Copy {
                shape,
                threads,
                bytes,
            } => {
                let copies = self
                    .copies
                    .as_mut()
                    .context("the memory to copy was not allocated")?;
                let Some((bytes, took)) = copies.run(shape, threads, bytes) else {
                    bail!("the memory to copy is too small for {threads} threads");
                };
                meter.add(took, bytes);
            }
            Limit::Stream { .. } => {
                let (copies, (_, streams)) = self
                    .copies
                    .as_ref()
                    .zip(self.streams.as_mut())
                    .context("no connection")?;
                let took = streams.round(copies.source())?;
                meter.add(took, streams.bytes());
            }
            Limit::Ping {
                request,
                answer,
                spin,
                one_core,
                window,
            } => {
                let kind = (request, answer, spin, one_core);
                let ping = self.pings.iter_mut().find(|(of, _)| *of == kind);
                let (_, ping) = ping.context("no connection")?;
                return Ok(ping.run(window)?);
            }
            Limit::Touch { bytes } => meter.add(first_touch(bytes), bytes),
            Limit::Flush { window } => {
                let flush = self
                    .flush
                    .as_mut()
                    .context("the file to flush was not created")?;
                return Ok(flush.run(window)?);
            }
        }
        Ok(meter)
    }
}
