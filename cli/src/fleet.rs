//! The worker processes, and the requests that they execute.

use crate::progress;
use crate::report::Tally;
use crate::worker::protocol::{Answer, Command};
use crate::worker::{Blocks, Handle, Options, Role};
use crate::workload::Request;
use anyhow::bail;
use futures::future::{join_all, try_join_all};
use std::cell::RefCell;
use std::path::Path;
use tokio::time::Instant;

/// The number of workers of each kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) prefill: u32,
    pub(crate) decode: u32,
}

/// How requests are scheduled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Maximum number of requests in progress, from arrival to the release of their leases. With 1,
    /// each request ends before the next begins.
    pub(crate) in_flight: usize,
    /// Factor by which the workload's timestamps are sped up; `None`: as fast as possible.
    pub(crate) speedup: Option<f64>,
}

/// Running workers.
#[derive(Debug)]
pub(crate) struct Fleet {
    prefill: Vec<Handle>,
    decode: Vec<Handle>,
    blocks: Blocks,
}

impl Fleet {
    /// Starts the workers, logs in `directory`, and waits until all have reached the pool. Call it
    /// on the main thread.
    pub(crate) async fn start(
        size: Size,
        options: &Options,
        directory: &Path,
    ) -> anyhow::Result<Self> {
        let start = |role: Role, count: u32| -> anyhow::Result<Vec<Handle>> {
            (0..count)
                .map(|number| {
                    let name = format!("{role}-{number}");
                    Handle::start(&name, &options.arguments(), &[], directory)
                })
                .collect()
        };
        let fleet = Self {
            prefill: start(Role::Prefill, size.prefill)?,
            decode: start(Role::Decode, size.decode)?,
            blocks: options.blocks,
        };
        try_join_all(
            fleet
                .prefill
                .iter()
                .chain(&fleet.decode)
                .map(async |worker| match worker.greeting().await? {
                    Answer::Ready => Ok(()),
                    other => bail!("{} sent {other:?} instead of ready", worker.name()),
                }),
        )
        .await?;
        Ok(fleet)
    }

    /// Executes all requests.
    pub(crate) async fn run(&self, requests: &[Request], pace: Pace) -> anyhow::Result<Tally> {
        let bar = progress::bar(requests.len() as u64, "requests");
        let begin = Instant::now();
        let waiting = RefCell::new((0u64..).zip(requests));
        let tally = RefCell::new(Tally::default());
        let lane = async |(prefill, decode): (&Handle, &Handle)| -> anyhow::Result<()> {
            loop {
                let Some((number, request)) = waiting.borrow_mut().next() else {
                    return Ok(());
                };
                if let Some(speedup) = pace.speedup {
                    tokio::time::sleep_until(begin + request.at.div_f64(speedup)).await;
                }
                self.serve(prefill, decode, number, request, &tally).await?;
                bar.inc(1);
            }
        };
        let workers = self.prefill.iter().cycle().zip(self.decode.iter().cycle());
        try_join_all(workers.take(pace.in_flight).map(lane)).await?;
        bar.finish_and_clear();
        Ok(tally.into_inner())
    }

    /// Executes one request. The prefill worker keeps its leases until the decode is done.
    async fn serve(
        &self,
        prefill: &Handle,
        decode: &Handle,
        number: u64,
        request: &Request,
        tally: &RefCell<Tally>,
    ) -> anyhow::Result<()> {
        let prompt = || request.prompt.clone();
        let command = Command::Prefill {
            request: number,
            prompt: prompt(),
        };
        let prefilled = match prefill.call(&command).await? {
            Answer::Prefilled(prefilled) => prefilled,
            other => bail!("unexpected reply of a prefill worker: {other:?}"),
        };
        let command = Command::Decode { prompt: prompt() };
        let decoded = match decode.call(&command).await? {
            Answer::Decoded(decoded) => decoded,
            other => bail!("unexpected reply of a decode worker: {other:?}"),
        };
        match prefill.call(&Command::Release { request: number }).await? {
            Answer::Released => {}
            other => bail!("unexpected reply of a prefill worker: {other:?}"),
        }
        tally
            .borrow_mut()
            .add(request.tokens, self.blocks, prefilled, decoded);
        Ok(())
    }

    /// Stops all workers in order.
    pub(crate) async fn stop(self) {
        join_all(
            self.prefill
                .into_iter()
                .chain(self.decode)
                .map(Handle::stop),
        )
        .await;
    }
}
