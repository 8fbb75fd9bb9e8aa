//! The log as it grows, for a standby that replays it.

use super::keys::Keys;
use super::log::{ReadSize, group, position, seq_of};
use super::patience::Patience;
use super::{EtcdStore, Revision};
use crate::store::{Groups, LogSeq, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_etcd::kv::{KeyValue, Op, Range, Txn};
use kvpool_etcd::watch::{Event, Watch, WatchOptions};
use kvpool_etcd::{Client, Error};
use std::collections::VecDeque;
use tokio::time::Instant;

impl EtcdStore {
    /// Follows the log after position `after`. The watch fails if a group is cut before it was
    /// delivered. If etcd does not answer now, the watch reads the log at its first call.
    pub async fn follow(&self, after: LogSeq) -> Result<LogWatch, StoreError> {
        self.check_open()?;
        let mut follow = LogWatch {
            client: self.client.clone(),
            keys: self.keys.clone(),
            next: LogSeq(after.0.saturating_add(1)),
            found: VecDeque::new(),
            source: Source::Read,
            size: ReadSize::new(),
            // Each call tries all endpoints.
            patience: Patience::new(self.options.request_timeout, 1),
        };
        match follow.read().await {
            Ok(()) | Err(StoreError::Unavailable { .. }) => Ok(follow),
            Err(error) => Err(error),
        }
    }
}

/// The groups of the log, in order and without a gap.
#[derive(Debug)]
pub struct LogWatch {
    client: Client,
    keys: Keys,
    /// The position of the next group to return.
    next: LogSeq,
    /// Groups found at positions from `next` on.
    found: VecDeque<KeyValue>,
    source: Source,
    size: ReadSize,
    patience: Patience,
}

/// The source of further groups.
#[derive(Debug)]
enum Source {
    /// Reads of the log.
    Read,
    /// A watch to be opened after this revision. The log was read through it.
    Behind(Revision),
    /// An open watch.
    Watch(Box<Watch>),
}

impl LogWatch {
    /// The next group, once it is durable. The future may be dropped while it waits.
    ///
    /// [`StoreError::OutsideLog`]: the group has been cut, and only snapshots contain it. After
    /// [`StoreError::Unavailable`] the caller may call this again. It then continues at the same
    /// position.
    pub async fn next(&mut self) -> Result<(LogSeq, Bytes), StoreError> {
        loop {
            if let Some(found) = self.found.front() {
                let seq = seq_of(&self.keys, found)?;
                if seq < self.next {
                    self.found.pop_front();
                    continue;
                }
                if seq == self.next {
                    let value = found.value.clone();
                    let client = self.patience.of(&self.client);
                    let begun = Instant::now();
                    let read = group(&client, &self.keys, seq, value).await;
                    if let Err(StoreError::Unavailable { .. }) = read {
                        self.patience.failed(begun.elapsed());
                    }
                    if let Some(group) = read? {
                        self.found.pop_front();
                        self.next = seq.next();
                        return Ok((seq, group));
                    }
                }
                // The group is gone, or an earlier group was missed. The log is read again.
                self.found.clear();
                self.source = Source::Read;
            }
            self.find().await?;
        }
    }

    async fn find(&mut self) -> Result<(), StoreError> {
        match &mut self.source {
            Source::Read => self.read().await,
            Source::Behind(revision) => {
                let options = WatchOptions {
                    keys: self.keys.log_from(LogSeq(0)),
                    start: revision.next(),
                    puts_only: true,
                };
                let client = self.patience.of(&self.client);
                let begun = Instant::now();
                match client.watch(&options).await {
                    Ok(watch) => {
                        self.patience.answered(begun.elapsed());
                        self.source = Source::Watch(Box::new(watch));
                        Ok(())
                    }
                    Err(error) => {
                        self.patience.failed(begun.elapsed());
                        self.broken(error)
                    }
                }
            }
            Source::Watch(watch) => match watch.next().await {
                Ok(Event::Put(found)) => {
                    self.found.push_back(found);
                    Ok(())
                }
                Ok(Event::Delete(_)) => Ok(()),
                Err(error) => self.broken(error),
            },
        }
    }

    /// Returns to reading the log. etcd may no longer have the watch's history, but the log may
    /// still have the groups.
    fn broken(&mut self, error: Error) -> Result<(), StoreError> {
        self.source = Source::Read;
        match error {
            Error::Compacted => Ok(()),
            error => Err(error.into()),
        }
    }

    /// Reads further from `next`, and changes to watching at the end of the log. After a read without an answer the
    /// next one has a longer limit and fewer groups.
    async fn read(&mut self) -> Result<(), StoreError> {
        let groups = self.keys.log_from(self.next).limit(self.size.count());
        let first = self.keys.log_from(LogSeq(0)).limit(1).keys_only();
        let read = Txn::new()
            .then(Op::get(groups))
            .then(Op::get(Range::key(self.keys.last())))
            .then(Op::get(first));
        let begun = Instant::now();
        let read = self.patience.of(&self.client).txn_repeatable(read).await;
        match &read {
            Err(Error::Unavailable { .. }) => {
                self.patience.failed(begun.elapsed());
                self.size.shrink();
            }
            _ => self.patience.answered(begun.elapsed()),
        }
        let read = read?;
        let last = position(read.get(1))?;
        let cut = match read.get(2) {
            Some(first) => LogSeq(seq_of(&self.keys, first)?.0.saturating_sub(1)),
            None => last,
        };
        let after = LogSeq(self.next.0 - 1);
        if after < cut || after > last {
            return Err(StoreError::OutsideLog {
                asked: after,
                cut,
                last,
            });
        }
        self.size.learn(read.read(0));
        self.found = read.read(0).to_vec().into();
        if !read.more(0) {
            self.source = Source::Behind(read.revision);
        }
        Ok(())
    }
}

#[async_trait]
impl Groups for LogWatch {
    async fn next(&mut self) -> Result<(LogSeq, Bytes), StoreError> {
        self.next().await
    }
}
