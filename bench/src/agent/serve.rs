//! The agent's process: reads commands, executes them, and answers.

use super::local::Embedded;
use super::protocol::{Answer, Command, Connect, Limit, Order, Set, Way, Work};
use super::yardstick::Yardstick;
use super::{blocks::Memory, load, lookups, moves};
use crate::limits::{self, Far};
use crate::usage::{self, Threads};
use crate::window::{Measured, Meter, Window, nanos, now_ns};
use anyhow::{Context as _, bail};
use kvctl::connection::{connect_error, remove_error};
use kvctl::remote::Reply;
use kvpool_client::{Options, Remove, Timeouts, TransportChoice, blocking};
use kvpool_types::Key;
use std::collections::HashMap;
use std::io::BufRead;
use std::time::Duration;

/// The timeout of one call, after which the benchmark fails.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The keys of one removal, well below a master's limit.
const REMOVED_AT_ONCE: usize = 8192;

/// Answers commands until the input ends. It works on a plain thread, because a blocking client must not run
/// on an async runtime.
pub(crate) async fn run(seed: String) -> anyhow::Result<()> {
    let (done, ended) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("bench-agent".to_owned())
        .spawn(move || {
            // The receiver is gone only if the process ends.
            let _ = done.send(answer_all(seed));
        })
        .context("cannot start a thread")?;
    ended.await.context("the agent's thread panicked")?
}

fn answer_all(seed: String) -> anyhow::Result<()> {
    let mut agent = Agent {
        seed,
        memory: Memory::default(),
        clients: HashMap::new(),
        embedded: None,
        far: None,
        yardstick: None,
    };
    Reply::Done(Answer::Done).send()?;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("cannot read commands")?;
        let command = serde_json::from_str(&line).context("invalid command")?;
        let reply = Reply::of(agent.execute(command));
        reply.send()?;
        if reply.is_last() {
            break;
        }
    }
    agent.execute(Command::Leave)?;
    Ok(())
}

#[derive(Debug)]
struct Agent {
    /// The keys of a run are derived from it.
    seed: String,
    memory: Memory,
    clients: HashMap<String, blocking::Client>,
    embedded: Option<Embedded>,
    far: Option<Far>,
    yardstick: Option<Yardstick>,
}

impl Agent {
    fn execute(&mut self, command: Command) -> anyhow::Result<Answer> {
        match command {
            Command::Memory { span, source } => self.memory = Memory::new(span, source),
            Command::Connect(connect) => {
                let client = open(&connect)?;
                self.clients.insert(connect.name, client);
            }
            Command::Keep { clients } => self.clients.retain(|name, _| clients.contains(name)),
            Command::ConnectMore { like, set, count } => {
                return self.connect_more(&like, &set, count);
            }
            Command::Embed(embed) => self.embedded = Some(Embedded::start(embed)?),
            Command::Leave => {
                // Clients go first: they may be connected to the node.
                self.clients.clear();
                if let Some(node) = self.embedded.take() {
                    node.stop();
                }
            }
            Command::Work(order) => return self.work(order),
            Command::Shuffle { client, set } => {
                load::shuffle(&self.seed, self.client(&client)?, &set)?;
            }
            Command::Load {
                writers,
                lasts,
                until,
            } => {
                let writers = writers.iter().map(|writer| {
                    let client = self.client(&writer.client)?;
                    Ok((writer, client))
                });
                let writers: Vec<_> = writers.collect::<anyhow::Result<_>>()?;
                return Ok(Answer::Loaded(load::run(
                    &self.seed, &writers, lasts, until,
                )?));
            }
            Command::Remove { client, set } => {
                remove(self.client(&client)?, &self.seed, &set, set.live.count())?;
            }
            Command::Listen { host, cert, key } => {
                let tls = limits::tls::server(&cert, &key)?;
                let far = Far::listen(host, tls).context("cannot listen")?;
                return Ok(Answer::Listens(self.far.insert(far).address()));
            }
            Command::Reach { span, far, ca } => {
                let tls = limits::tls::client(&ca)?;
                self.yardstick = Some(Yardstick::new(span, far, tls));
            }
            Command::Limit { limit, watch } => return self.limit(limit, &watch),
        }
        Ok(Answer::Done)
    }

    fn client(&self, name: &str) -> anyhow::Result<&blocking::Client> {
        self.clients
            .get(name)
            .with_context(|| format!("there is no client named {name}"))
    }

    fn work(&mut self, order: Order) -> anyhow::Result<Answer> {
        let Order { set, window, .. } = &order;
        let client = self
            .clients
            .get(&order.client)
            .with_context(|| format!("there is no client named {}", order.client))?;
        let clock = Clock {
            watch: &order.watch,
            begin_ns: order.begin_ns,
            window: *window,
        };
        let mut live = set.live;
        let measured = match order.work {
            Work::Put {
                batch,
                evicts,
                ref reader,
            } => {
                // The first call beside a reader is not timed.
                let calls = window.calls + u64::from(reader.is_some());
                let coming = calls * batch;
                let over = (live.count() + coming).saturating_sub(set.slots);
                let over = over.min(live.count());
                if !evicts {
                    remove(client, &self.seed, set, over)?;
                }
                live.first += over;
                let reader = reader.as_ref().map(|name| {
                    let reader = self.clients.get(name);
                    reader.with_context(|| format!("there is no client named {name}"))
                });
                let put = moves::Puts {
                    client,
                    reader: reader.transpose()?,
                    evicts,
                    seed: &self.seed,
                    set,
                    batch,
                };
                let (measured, put) = put.run(&mut self.memory, clock)?;
                live.end += put;
                measured
            }
            Work::Remove { batch } => {
                let put = moves::Puts {
                    client,
                    reader: None,
                    evicts: false,
                    seed: &self.seed,
                    set,
                    batch,
                };
                let (measured, gone) = put.run_removals(&mut self.memory, clock)?;
                live.end += gone;
                live.first = live.end;
                measured
            }
            Work::Get { batch, from, among } => {
                let gets = moves::Gets {
                    client,
                    seed: &self.seed,
                    set,
                    batch,
                    from,
                    among,
                };
                gets.run(&mut self.memory, clock)?
            }
            Work::View { among } => lookups::views(client, &self.seed, set, among, clock)?,
            Work::Exist { batch, lease } => {
                lookups::exist(client, &self.seed, set, batch, lease, clock)?
            }
            Work::MatchPrefix { blocks } => {
                lookups::match_prefix(client, &self.seed, set, blocks, clock)?
            }
        };
        Ok(Answer::Measured { measured, live })
    }

    fn limit(&mut self, limit: Limit, watch: &[u32]) -> anyhow::Result<Answer> {
        let yardstick = self
            .yardstick
            .as_mut()
            .context("the memory to copy was not allocated")?;
        // Opening connections and first touches of memory are not part of the limit.
        yardstick.prepare(limit)?;
        let clock = Clock {
            watch,
            begin_ns: 0,
            window: Window {
                at_least: Duration::ZERO,
                calls: 1,
            },
        };
        let measured = clock.time(|_| yardstick.run(limit))?;
        Ok(Answer::Measured {
            measured,
            live: Default::default(),
        })
    }

    fn connect_more(&self, like: &Connect, set: &Set, count: u32) -> anyhow::Result<Answer> {
        let own = std::process::id();
        let anonymous = || usage::resident(own).map_or(0, |resident| resident.anonymous);
        let get_one = |client: &blocking::Client| {
            client
                .get(&super::blocks::key(&self.seed, set, set.live.first))
                .map_err(kvctl::connection::get_error)
        };
        // The first connection takes memory that later ones share.
        let first = open(like)?;
        get_one(&first)?;
        let before = anonymous();
        let mut more = Vec::new();
        for _ in 0..count {
            let client = open(like)?;
            if get_one(&client)?.is_none() {
                bail!("a block that was put is missing");
            }
            more.push(client);
        }
        let taken = anonymous().saturating_sub(before);
        Ok(Answer::PerConnection(
            taken as f64 / f64::from(count.max(1)),
        ))
    }
}

/// Connects a client with the default options, except for those that the case is about.
fn open(connect: &Connect) -> anyhow::Result<blocking::Client> {
    let defaults = Options::default();
    let options = Options {
        masters: kvpool_client::masters(&connect.master),
        transport: match connect.way {
            Way::Shm => TransportChoice::Shm,
            Way::Rdma => TransportChoice::Rdma,
            Way::Tcp => TransportChoice::Tcp,
        },
        timeouts: Timeouts {
            connect: TIMEOUT,
            put: TIMEOUT,
            get: TIMEOUT,
            control: TIMEOUT,
        },
        location_cache: if connect.remembers {
            defaults.location_cache
        } else {
            0
        },
        spin: connect.spin,
        token_file: connect.access.token_file.clone(),
        tls: connect.access.files(),
        ..defaults
    };
    blocking::Client::connect(options).map_err(connect_error)
}

/// Removes the oldest `count` blocks of a set.
pub(super) fn remove(
    client: &blocking::Client,
    seed: &str,
    set: &Set,
    count: u64,
) -> anyhow::Result<()> {
    let numbers = set.live.first..set.live.first + count;
    let keys: Vec<Key> = numbers
        .map(|number| super::blocks::key(seed, set, number))
        .collect();
    for some in keys.chunks(REMOVED_AT_ONCE) {
        let removed = client
            .remove(Remove::Keys(some.to_vec()), true)
            .map_err(remove_error)?;
        if removed.kept > 0 {
            bail!("{} blocks could not be removed", removed.kept);
        }
    }
    Ok(())
}

/// The start and end of a window, and the processes whose processor time is counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock<'a> {
    watch: &'a [u32],
    begin_ns: u64,
    window: Window,
}

impl Clock<'_> {
    /// Runs `work` for the window, and adds the times of the clocks.
    pub(super) fn time(
        self,
        work: impl FnOnce(Window) -> anyhow::Result<Meter>,
    ) -> anyhow::Result<Measured> {
        // Reading /proc takes time, so it comes before the common start.
        let watched: Vec<Threads> = self.watch.iter().map(|id| Threads::of(*id)).collect();
        if let Some(early) = self.begin_ns.checked_sub(now_ns()) {
            std::thread::sleep(Duration::from_nanos(early));
        }
        let before = usage::own_cpu();
        let begin_ns = now_ns();
        let meter = work(self.window)?;
        let end_ns = now_ns();
        let own = usage::own_cpu().saturating_sub(before);
        let others = watched.iter().map(Threads::since);
        let cpu_ns = std::iter::once(own).chain(others).map(nanos).collect();
        Ok(Measured {
            begin_ns,
            end_ns,
            cpu_ns,
            ..meter.measured()
        })
    }
}
