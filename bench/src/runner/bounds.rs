//! The bound of a case: plain code, or another case.

use super::{MIB, Runner, measured};
use crate::agent::protocol::{Command, Limit};
use crate::cases::{Bare, Blocks, Bound, Case, Copier, Metric, size};
use crate::window::Window;
use crate::{limits, usage};
use std::time::Duration;

impl Runner {
    /// The plain code that bounds a case, with its choices made.
    pub(super) async fn bare_of(&mut self, case: &Case) -> anyhow::Result<Option<Bare>> {
        let bare = match &case.bound {
            Bound::Bare(bare) => *bare,
            Bound::StreamsAsUsed | Bound::TlsStreamsAsUsed => {
                let port = self.running(case.place.pool)?.data_port().await?;
                let used = usage::connections(self.client(0)?.id(), port);
                Bare::Stream {
                    streams: used.clamp(1, 2),
                    pinned: false,
                    tls: case.bound == Bound::TlsStreamsAsUsed,
                }
            }
            Bound::FlushAnd(_) => Bare::Flush,
            Bound::Case(_) | Bound::None(_) => return Ok(None),
        };
        Ok(Some(match bare {
            Bare::Copy(blocks, threads, Copier::Fastest) => {
                Bare::Copy(blocks, threads, self.fastest(blocks, threads).await?)
            }
            bare => bare,
        }))
    }

    /// Measures once which way to copy is faster.
    async fn fastest(&mut self, blocks: Blocks, threads: usize) -> anyhow::Result<Copier> {
        let name = format!("{} {threads}", blocks.tag());
        if let Some(copier) = self.fastest.get(&name) {
            return Ok(*copier);
        }
        let mut best = (Copier::Plain, 0.0);
        for _ in 0..4 {
            for copier in [Copier::Plain, Copier::Streaming] {
                let bare = Bare::Copy(blocks, threads, copier);
                let rate = self.bare(bare, Metric::Rate).await?;
                if rate > best.1 {
                    best = (copier, rate);
                }
            }
        }
        self.fastest.insert(name, best.0);
        Ok(best.0)
    }

    /// One window of the bound of a case.
    pub(super) async fn bound(
        &mut self,
        case: &Case,
        bare: Option<Bare>,
        other: Option<&Case>,
    ) -> anyhow::Result<Option<f64>> {
        Ok(match (bare, other) {
            (Some(bare), Some(other)) => {
                let flush = self.bare(bare, case.metric).await?;
                Some(flush + 1.5 * self.once(other).await?.value)
            }
            (Some(bare), None) => Some(self.bare(bare, case.metric).await?),
            (None, Some(other)) => {
                // In the unit of this case, also if the other case has another metric.
                let other = Case {
                    metric: case.metric,
                    ..other.clone()
                };
                Some(self.once(&other).await?.value)
            }
            (None, None) => None,
        })
    }

    /// One window of plain code.
    pub(super) async fn bare(&mut self, bare: Bare, metric: Metric) -> anyhow::Result<f64> {
        let bytes = if self.settings.quick {
            32 * MIB
        } else {
            96 * MIB
        };
        let ping_window = Window {
            at_least: Duration::from_millis(if self.settings.quick { 4 } else { 12 }),
            calls: 40,
        };
        let (agent, limit) = match bare {
            Bare::Copy(blocks, threads, Copier::Fastest) => {
                let copier = Box::pin(self.fastest(blocks, threads)).await?;
                let bare = Bare::Copy(blocks, threads, copier);
                return Box::pin(self.bare(bare, metric)).await;
            }
            Bare::Copy(blocks, threads, copier) => {
                let agent = match copier {
                    Copier::Plain => &self.far,
                    Copier::Streaming | Copier::Fastest => &self.near,
                };
                let shape: limits::Shape = blocks.shape();
                (
                    agent,
                    Limit::Copy {
                        shape,
                        threads,
                        bytes,
                    },
                )
            }
            Bare::Stream {
                streams,
                pinned,
                tls,
            } => (
                &self.near,
                Limit::Stream {
                    streams,
                    pinned,
                    tls,
                    bytes,
                },
            ),
            Bare::Ping {
                request,
                answer,
                spin,
                one_core,
            } => (
                &self.near,
                Limit::Ping {
                    request,
                    answer,
                    spin,
                    one_core,
                    window: ping_window,
                },
            ),
            Bare::Touch => (&self.near, Limit::Touch { bytes }),
            Bare::Flush => (
                &self.near,
                Limit::Flush {
                    window: ping_window,
                },
            ),
        };
        let watch = match bare {
            Bare::Stream { .. } => vec![self.far.id()],
            _ => Vec::new(),
        };
        let (measured, _) = measured(agent.call(&Command::Limit { limit, watch }).await?)?;
        let seconds = measured.spent_ns as f64 / 1e9;
        Ok(match (metric, bare) {
            (Metric::P50, _) => measured.p50_ns as f64 / 1e3,
            (Metric::Keys, Bare::Ping { request, .. }) => {
                (measured.units * request / 32) as f64 / seconds / 1e6
            }
            (Metric::Cpu, _) => {
                measured.cpu_ns.iter().sum::<u64>() as f64 / measured.units.max(1) as f64
            }
            _ => measured.units as f64 / seconds / 1e9,
        })
    }
}

/// The name of plain code in the report.
pub(super) fn name_of(bare: Bare) -> String {
    match bare {
        Bare::Copy(blocks, threads, copier) => {
            let how = match copier {
                Copier::Streaming => "streaming memcpy",
                Copier::Plain | Copier::Fastest => "memcpy",
            };
            let piece = size(blocks.bytes / blocks.pieces);
            match threads {
                1 => format!("{how} of {piece}"),
                several => format!("{how} of {piece}, {several} threads"),
            }
        }
        Bare::Stream { streams, tls, .. } => {
            let what = if tls { "rustls over TCP" } else { "bare TCP" };
            match streams {
                1 => format!("{what}, 1 stream"),
                several => format!("{what}, {several} streams"),
            }
        }
        Bare::Ping {
            request: 1,
            spin: false,
            ..
        } => "ping-pong".to_owned(),
        Bare::Ping {
            request: 1,
            spin: true,
            ..
        } => "ping-pong, spinning".to_owned(),
        Bare::Ping { request, .. } => {
            format!("ping-pong of {}", size(request))
        }
        Bare::Touch => "first touch".to_owned(),
        Bare::Flush => "fdatasync of 4 KiB".to_owned(),
    }
}
