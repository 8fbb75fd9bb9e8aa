//! Prepares a case: its pool, processes, connections and blocks.

use super::{
    FILL_BATCH, MIB, Runner, SPIN, Settings, UNLIMITED, client_name, measured, reader_name,
    start_agent,
};
use crate::agent::protocol::{Command, Connect, Embed, Live, Order, Set, Way, Work};
use crate::cases::{Blocks, Case, Kept, Place, Pool, What};
use crate::pools::{Running, WINDOW_BYTES, local_segment};
use crate::window::Window;
use anyhow::Context as _;
use std::time::Duration;

impl Runner {
    /// Prepares the pool, the processes, the connections and the blocks of a case.
    pub(super) async fn prepare(&mut self, case: &Case) -> anyhow::Result<()> {
        if matches!(case.what, What::Machine(_)) {
            return Ok(());
        }
        let Place {
            pool,
            way,
            remembers,
            spins,
            clients,
            ..
        } = case.place;
        self.start_clients(clients).await?;
        self.start_pool(pool).await?;
        let spin = if spins { SPIN } else { Duration::ZERO };
        let running = self.running(pool)?;
        let connect = running.connect(client_name(case.place), way, remembers, spin);
        for number in 0..clients {
            let client = self.client(number)?;
            client.call(&Command::Connect(connect.clone())).await?;
        }
        if matches!(case.what, What::PutRead(..)) {
            let reader = Connect {
                name: reader_name(&connect.name),
                ..connect.clone()
            };
            self.client(0)?.call(&Command::Connect(reader)).await?;
        }
        match case.what.blocks(pool) {
            // The only case of its pool: all its blocks are new.
            Some(_) if pool == Pool::Fresh => Ok(()),
            Some(blocks) if pool == Pool::Full => self.overfill(blocks, &connect.name).await,
            Some(blocks) => self.fill(pool, blocks, &connect.name).await,
            None => Ok(()),
        }
    }

    pub(super) async fn start_clients(&mut self, count: usize) -> anyhow::Result<()> {
        let span = self.settings.span;
        while self.clients.len() < count {
            let number = self.clients.len();
            let name = format!("client-{number}");
            let client = start_agent(&name, &self.seed, &[], &self.directory)?;
            client.greeting().await?;
            // Only the first client puts.
            let source = number == 0;
            client.call(&Command::Memory { span, source }).await?;
            self.clients.push(client);
        }
        Ok(())
    }

    /// Puts blocks until the pool has evicted all others, so new blocks replace blocks of the same set.
    async fn overfill(&mut self, blocks: Blocks, client: &str) -> anyhow::Result<()> {
        let running = self.running(Pool::Full)?;
        let capacity = running.capacity().await?;
        // No number is used twice, because its block may still be present.
        let known = running.sets.get(&blocks.tag()).cloned();
        let set = known.unwrap_or_else(|| blocks.set(self.settings.span));
        let set = self.put_over(set, capacity, client).await?;
        self.set_live(Pool::Full, set)
    }

    /// Puts at least `bytes` of new blocks into a pool that evicts.
    pub(super) async fn put_over(
        &self,
        mut set: Set,
        bytes: u64,
        client: &str,
    ) -> anyhow::Result<Set> {
        let batch = (32 * MIB / set.block).clamp(1, FILL_BATCH).min(set.slots);
        let order = Order {
            client: client.to_owned(),
            set: set.clone(),
            work: Work::Put {
                batch,
                evicts: true,
                reader: None,
            },
            window: Window {
                at_least: UNLIMITED,
                calls: bytes.div_ceil(batch * set.block),
            },
            watch: Vec::new(),
            begin_ns: 0,
        };
        (_, set.live) = measured(self.client(0)?.call(&Command::Work(order)).await?)?;
        Ok(set)
    }

    async fn start_pool(&mut self, pool: Pool) -> anyhow::Result<()> {
        let pool = self.pool(pool);
        if self.pools.contains_key(&pool) {
            return Ok(());
        }
        let Settings {
            span,
            ssd,
            connection,
            veth,
            ..
        } = &self.settings;
        let running = if connection.master.is_some() && pool.may_be_foreign() {
            Running::foreign(connection).await?
        } else {
            let veth = veth.as_deref();
            Running::start(pool, *span, *ssd, connection, veth, &self.material).await?
        };
        if pool == Pool::Local {
            let embed = Embed {
                master: running.address().to_owned(),
                segment: local_segment(*span),
                socket: running.path()?.join("local.sock"),
            };
            self.client(0)?.call(&Command::Embed(embed)).await?;
            running.wait_for_node().await?;
        }
        self.pools.insert(pool, running);
        Ok(())
    }

    /// Puts the blocks of a set, unless they are present.
    async fn fill(&mut self, pool: Pool, blocks: Blocks, client: &str) -> anyhow::Result<()> {
        let tag = blocks.tag();
        if self.running(pool)?.sets.contains_key(&tag) {
            return Ok(());
        }
        if blocks.kept == Kept::Span {
            self.remove_spans(pool, client).await?;
        }
        let mut set = blocks.set(self.settings.span);
        let bytes = set.slots * set.block;
        let running = self.running(pool)?;
        running
            .wait_for_room(bytes + WINDOW_BYTES.min(bytes))
            .await?;
        let batch = (32 * MIB / set.block).clamp(1, FILL_BATCH).min(set.slots);
        let rest = set.slots % batch;
        self.expect(pool, &set, set.slots)?;
        for (calls, batch) in [(set.slots / batch, batch), (1, rest)] {
            if batch > 0 {
                let order = Order {
                    client: client.to_owned(),
                    set: set.clone(),
                    work: Work::Put {
                        batch,
                        evicts: false,
                        reader: None,
                    },
                    window: Window {
                        at_least: UNLIMITED,
                        calls,
                    },
                    watch: Vec::new(),
                    begin_ns: 0,
                };
                (_, set.live) = measured(self.client(0)?.call(&Command::Work(order)).await?)?;
            }
        }
        self.set_live(pool, set)
    }

    /// Notes that up to `coming` blocks may be put, so that they are removed if the puts fail midway.
    pub(super) fn expect(&mut self, pool: Pool, set: &Set, coming: u64) -> anyhow::Result<()> {
        let live = Live {
            first: set.live.first,
            end: set.live.end + coming,
        };
        self.set_live(
            pool,
            Set {
                live,
                ..set.clone()
            },
        )
    }

    pub(super) fn set_live(&mut self, pool: Pool, set: Set) -> anyhow::Result<()> {
        let pool = self.pool(pool);
        let running = self
            .pools
            .get_mut(&pool)
            .context("the pool has been stopped")?;
        running.sets.insert(set.tag.clone(), set);
        Ok(())
    }

    /// Removes the sets that fill the span, because the pool has room for a few of them only.
    async fn remove_spans(&mut self, pool: Pool, client: &str) -> anyhow::Result<()> {
        let pool = self.pool(pool);
        let least = WINDOW_BYTES.min(self.settings.span);
        let large = |set: &&Set| set.slots * set.block >= least;
        let sets = self.running(pool)?.sets.values();
        let removed: Vec<Set> = sets.filter(large).cloned().collect();
        for set in removed {
            let (client, tag) = (client.to_owned(), set.tag.clone());
            self.client(0)?
                .call(&Command::Remove { client, set })
                .await?;
            if let Some(running) = self.pools.get_mut(&pool) {
                running.sets.remove(&tag);
            }
        }
        Ok(())
    }

    /// Removes the blocks of this run from an existing pool, as far as its master answers.
    pub(super) async fn clean(&mut self) -> anyhow::Result<()> {
        if self.settings.connection.master.is_none() {
            return Ok(());
        }
        let Some(running) = self.pools.get_mut(&Pool::Main) else {
            return Ok(());
        };
        let sets: Vec<Set> = running.sets.drain().map(|(_, set)| set).collect();
        let connect = running.connect("cleaning".to_owned(), Way::Tcp, false, Duration::ZERO);
        let mut cleaned = Ok(());
        for set in sets {
            let removed = self.remove_all(&connect, set).await;
            cleaned = cleaned.and(removed);
        }
        cleaned
    }

    /// Removes the blocks of a set with a process of its own: a process ends with its first failure.
    async fn remove_all(&self, connect: &Connect, set: Set) -> anyhow::Result<()> {
        let agent = start_agent(&connect.name, &self.seed, &[], &self.directory)?;
        agent.greeting().await?;
        agent.call(&Command::Connect(connect.clone())).await?;
        let client = connect.name.clone();
        agent.call(&Command::Remove { client, set }).await?;
        agent.stop().await;
        Ok(())
    }
}
