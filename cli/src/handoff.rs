//! The hand-offs of `kvctl bench handoff`: push, pull, two ranks to one, and layer by layer, beside bare TCP.
//!
//! ```text
//!  commands::bench::handoff ──Load──► run ──► Group: sessions of prefill ──loopback──► one of decode
//!                                      │├───► BareTcp: as many bytes over plain streams
//!                                      ▼▼
//!                                    Rates of each round ──► Report
//! ```
//!
//! Both ends are in this process, so that hand-offs and bare TCP share the processor alike. Each round measures every
//! case in turn, and a ratio is computed from two rates of one round.

mod bare_tcp;
mod group;
mod report;

pub(crate) use group::PAGE_BYTES;
pub(crate) use report::Report;

use crate::{progress, stats};
use anyhow::Context as _;
use bare_tcp::BareTcp;
use group::{Group, LAYERS};
use kvpool_types::Length;
use report::Rates;
use tokio::sync::oneshot;

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// The pages of one hand-off, each of [`PAGE_BYTES`].
    pub(crate) pages: u32,
    /// How often each case is measured, at least once.
    pub(crate) rounds: u32,
    /// The streams of bare TCP, at least one.
    pub(crate) streams: u32,
}

impl Load {
    fn bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES
    }
}

/// Measures the rounds on a plain thread: an interrupted program does not wait for it.
pub(crate) async fn run(load: Load) -> anyhow::Result<Report> {
    let (done, ended) = oneshot::channel();
    std::thread::Builder::new()
        .name("handoff".to_owned())
        .spawn(move || {
            // The receiver is gone only if the program ends.
            let _ = done.send(measure(&load));
        })
        .context("cannot start a thread")?;
    ended
        .await
        .context("the thread of the hand-offs panicked")?
}

fn measure(load: &Load) -> anyhow::Result<Report> {
    let mut cases = Cases::start(load)?;
    let bar = progress::bar(u64::from(load.rounds), "rounds");
    let mut rounds = Vec::new();
    for _ in 0..load.rounds {
        rounds.push(cases.round()?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Report::of(load, &rounds))
}

/// The memory and the sessions of all cases.
struct Cases {
    bytes: u64,
    cold: BareTcp,
    hot: BareTcp,
    one: Group,
    two: Group,
}

impl Cases {
    fn start(load: &Load) -> anyhow::Result<Self> {
        let length = Length(load.bytes()).as_usize();
        let hot = Length(PAGE_BYTES).as_usize();
        let streams = usize::try_from(load.streams)?;
        let mut cases = Self {
            bytes: load.bytes(),
            cold: BareTcp::new(length, 1, streams),
            hot: BareTcp::new(hot, load.pages, streams),
            one: Group::start(1, load.pages)?,
            two: Group::start(2, load.pages)?,
        };
        // The first push connects the sessions.
        cases.one.push()?;
        cases.two.push()?;
        Ok(cases)
    }

    fn round(&mut self) -> anyhow::Result<Rates> {
        let tcp = self.cold.measure().context("bare TCP failed")?;
        let push = self.one.push().context("the push failed")?;
        let tcp_hot = self.hot.measure().context("bare TCP failed")?;
        let slices = self.two.push().context("the push of two ranks failed")?;
        let pull = self.one.pull().context("the pull failed")?;
        let compute = push / LAYERS;
        let layerwise = self.one.push_by_layer(compute);
        let layerwise = layerwise.context("the push by layer failed")?;
        let exposed = layerwise.saturating_sub(compute * LAYERS);
        let rate = |took| stats::gigabytes_a_second(self.bytes, took);
        Ok(Rates {
            tcp: rate(tcp),
            tcp_hot: rate(tcp_hot),
            push: rate(push),
            pull: rate(pull),
            slices: rate(slices),
            layerwise: rate(layerwise),
            hidden: 1.0 - exposed.as_secs_f64() / push.as_secs_f64(),
        })
    }
}
