//! Calls that only the master answers: presence, prefixes, descriptions, listings, removals, counts.

use crate::api::{
    DescribedReplica, Description, Detached, Existence, Leasing, Listed, Listing, MediumStats,
    NodeStats, Page, PoolStats, Prefix, Remove, Removed, SegmentStats,
};
use crate::client::Client;
use crate::clock::{BootTime, Deadline};
use crate::control::Call;
use crate::errors::{ControlError, RemoveError};
use crate::lease::{Lease, counted};
use crate::locate::{code_of, expect_answers, malformed};
use crate::packed::{Packed, PackedKeys, PackedRun};
use crate::releases::LeasePart;
use futures::{StreamExt, TryStreamExt};
use kvpool_proto::{
    DescribeRequest, DetachMediumRequest, DetachOutcome, ExistRequest, ListRequest,
    MatchPrefixRequest, RemoveReply, RemoveRequest, StatsRequest, remove_request::What,
};
use kvpool_types::wire::keys::pack;
use kvpool_types::{
    Checksum, Code, Epoch, Extent, Incarnation, Key, Length, MediumId, Offset, SegmentId, Version,
};
use std::time::Duration;

/// The keys of one message.
enum Run<'k> {
    Keys(&'k [Key]),
    Packed(PackedRun),
}

impl Client {
    /// Which of `keys` are present. The master leases the present blocks. Each lease ends when this client
    /// gets the block.
    ///
    /// # Errors
    ///
    /// Those of [`Client::exist`], which also describes cancellation.
    pub async fn is_exist(&self, keys: &[Key]) -> Result<Vec<bool>, ControlError> {
        Ok(self.exist(keys, Leasing::Lease).await?.present)
    }

    /// Which of `keys` are present, with the lease on the present ones.
    ///
    /// # Errors
    ///
    /// [`ControlError`] with the code of the last attempt, once [`crate::Timeouts::control`] has passed or the
    /// master refused the call.
    ///
    /// # Cancellation
    ///
    /// Dropping the future changes nothing in the pool. Leases that it took run out by themselves.
    pub async fn exist(&self, keys: &[Key], leasing: Leasing) -> Result<Existence, ControlError> {
        let runs = self.runs(keys).into_iter();
        self.exist_in(runs.map(Run::Keys).collect(), leasing).await
    }

    /// [`Client::exist`] for keys that were packed one by one.
    ///
    /// # Errors
    ///
    /// Those of [`Client::exist`], which also describes cancellation.
    pub async fn exist_packed(
        &self,
        keys: PackedKeys,
        leasing: Leasing,
    ) -> Result<Existence, ControlError> {
        let runs = keys.runs().into_iter();
        self.exist_in(runs.map(Run::Packed).collect(), leasing)
            .await
    }

    async fn exist_in(
        &self,
        mut runs: Vec<Run<'_>>,
        leasing: Leasing,
    ) -> Result<Existence, ControlError> {
        let deadline = self.control_deadline();
        // Most batches are one message, which needs no concurrency.
        if runs.len() == 1
            && let Some(run) = runs.pop()
        {
            let call = Call::by(deadline);
            let (present, part) = self.exist_run(run, leasing, call).await?;
            return Ok(Existence {
                present,
                lease: self.lease(part.into_iter().collect()),
            });
        }
        let asked: Vec<_> = runs
            .into_iter()
            .enumerate()
            .map(|(number, run)| self.exist_run(run, leasing, Call::by(deadline).over(number)))
            .collect();
        let replies: Vec<_> = futures::stream::iter(asked)
            .buffered(self.inner.options.batch_concurrency.max(1))
            .try_collect()
            .await?;
        let (present, parts): (Vec<_>, Vec<_>) = replies.into_iter().unzip();
        Ok(Existence {
            present: present.into_iter().flatten().collect(),
            lease: self.lease(parts.into_iter().flatten().collect()),
        })
    }

    async fn exist_run(
        &self,
        run: Run<'_>,
        leasing: Leasing,
        call: Call,
    ) -> Result<(Vec<bool>, Option<LeasePart>), ControlError> {
        let (keys, count) = match run {
            // The keys are encoded only now, while earlier messages are in flight.
            Run::Keys(keys) => (pack(keys).into(), keys.len()),
            Run::Packed(run) => (run.keys, run.count),
        };
        let sent = BootTime::now();
        let request = ExistRequest {
            caller: None,
            keys: keys.clone(),
            no_lease: leasing == Leasing::None,
        };
        let reply = self.inner.control.call(request, call).await?;
        let present = read_bits(&reply.present, count)?;
        let part = counted(reply.lease.as_ref(), sent, reply.epoch).map(|leased| LeasePart {
            keys: Packed::select(&keys, count, |at| present.get(at) == Some(&true)),
            leased,
        });
        Ok((present, part))
    }

    /// Returns how many leading blocks of a chain are present, with a lease on these blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Client::exist`], which also describes cancellation.
    pub async fn match_prefix(&self, keys: &[Key]) -> Result<Prefix, ControlError> {
        self.match_prefix_with(keys, Leasing::Lease).await
    }

    /// [`Client::match_prefix`]; `leasing` says whether the master leases the blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Client::exist`], which also describes cancellation.
    pub async fn match_prefix_with(
        &self,
        keys: &[Key],
        leasing: Leasing,
    ) -> Result<Prefix, ControlError> {
        self.match_prefix_packed(self.pack(keys), leasing).await
    }

    /// [`Client::match_prefix_with`] for keys that were packed one by one.
    ///
    /// # Errors
    ///
    /// Those of [`Client::exist`], which also describes cancellation.
    pub async fn match_prefix_packed(
        &self,
        keys: PackedKeys,
        leasing: Leasing,
    ) -> Result<Prefix, ControlError> {
        let deadline = self.control_deadline();
        let mut blocks = 0;
        let mut parts = Vec::new();
        // The messages go one after the other, so that blocks behind the first gap are neither asked for nor
        // leased.
        for run in keys.runs() {
            let sent = BootTime::now();
            let request = MatchPrefixRequest {
                caller: None,
                keys: run.keys.clone(),
                no_lease: leasing == Leasing::None,
            };
            let reply = self.inner.control.call(request, Call::by(deadline)).await?;
            let present = usize::try_from(reply.blocks)
                .ok()
                .filter(|blocks| *blocks <= run.count)
                .ok_or_else(|| malformed(format!("{} of {} blocks", reply.blocks, run.count)))?;
            blocks += present;
            if let Some(leased) = counted(reply.lease.as_ref(), sent, reply.epoch) {
                parts.push(LeasePart {
                    keys: Packed::select(&run.keys, run.count, |at| at < present),
                    leased,
                });
            }
            if present < run.count {
                break;
            }
        }
        Ok(Prefix {
            blocks,
            lease: self.lease(parts),
        })
    }

    /// The length of a block in bytes; `None` when it is absent. Leases nothing.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`], which also describes cancellation.
    pub async fn get_size(&self, key: &Key) -> Result<Option<Length>, ControlError> {
        let described = self.describe(std::slice::from_ref(key)).await?;
        Ok(described
            .into_iter()
            .next()
            .flatten()
            .map(|description| description.length))
    }

    /// The master's description of each of `keys`; `None` for an absent key. Leases nothing.
    ///
    /// # Errors
    ///
    /// [`ControlError`] with the code of the last attempt, once [`crate::Timeouts::control`] has passed or the
    /// master refused the call.
    ///
    /// # Cancellation
    ///
    /// Dropping the future changes nothing in the pool.
    pub async fn describe(&self, keys: &[Key]) -> Result<Vec<Option<Description>>, ControlError> {
        let deadline = self.control_deadline();
        let calls = self.runs(keys).into_iter().map(|keys| async move {
            let request = DescribeRequest {
                caller: None,
                keys: pack(keys).into(),
            };
            let reply = self.inner.control.call(request, Call::by(deadline)).await?;
            expect_answers(reply.descriptions.len(), keys.len())?;
            reply
                .descriptions
                .into_iter()
                .map(read_description)
                .collect::<Result<Vec<_>, ControlError>>()
        });
        let replies: Vec<_> = futures::stream::iter(calls)
            .buffered(self.inner.options.batch_concurrency.max(1))
            .try_collect()
            .await?;
        Ok(replies.into_iter().flatten().collect())
    }

    /// One page of the namespace's blocks whose keys match the regular expression `pattern`. An empty pattern
    /// matches every key. `limit` is the most blocks of the page; 0 means the master's own limit.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`], which also describes cancellation.
    pub async fn list(
        &self,
        pattern: &str,
        limit: u32,
        page: Option<&Page>,
    ) -> Result<Listing, ControlError> {
        let request = ListRequest {
            caller: None,
            pattern: pattern.to_owned(),
            limit,
            page: page.map(|page| page.0.clone()).unwrap_or_default(),
        };
        let call = Call::by(self.control_deadline());
        let reply = self.inner.control.call(request, call).await?;
        let blocks = reply
            .blocks
            .into_iter()
            .map(|block| Listed {
                key: block.key,
                length: Length(block.length),
                replicas: block.replicas,
                leased: block.leased,
                pinned: block.pinned,
            })
            .collect();
        Ok(Listing {
            blocks,
            next: (!reply.next_page.is_empty()).then_some(Page(reply.next_page)),
        })
    }

    /// Removes blocks. Leased and pinned blocks stay unless `force` is set. When the call returns,
    /// even with an error, this client has no cached locations of the named blocks.
    ///
    /// # Errors
    ///
    /// [`RemoveError::OutcomeUnknown`] when the answer is lost. The client does not repeat a
    /// removal that may have been done, because another client may have put the key again.
    ///
    /// # Cancellation
    ///
    /// The master may still remove the blocks. This client may then read a removed block from its last known
    /// location, until the lease that came with the location would have run out.
    pub async fn remove(&self, what: Remove, force: bool) -> Result<Removed, RemoveError> {
        let outcome = Box::pin(self.remove_at_master(&what, force)).await;
        match &what {
            Remove::Keys(keys) => {
                self.inner.locations.purge(keys);
                self.inner.releases.forget(keys);
            }
            Remove::Pattern(_) | Remove::Namespace | Remove::Everything => {
                self.inner.locations.purge_all();
                self.inner.releases.forget_all();
            }
        }
        outcome
    }

    /// The state and the counters of the leader: blocks, bytes, nodes and segments.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`], which also describes cancellation.
    pub async fn stats(&self) -> Result<PoolStats, ControlError> {
        let call = Call::by(self.control_deadline());
        let reply = self
            .inner
            .control
            .call(StatsRequest::default(), call)
            .await?;
        Ok(PoolStats {
            epoch: Epoch(reply.epoch),
            blocks: reply.blocks,
            reservations: reply.reservations,
            capacity: Length(reply.capacity_bytes),
            used: Length(reply.used_bytes),
            quarantine: Length(reply.quarantine_bytes),
            nodes: reply
                .nodes
                .into_iter()
                .map(read_node)
                .collect::<Result<_, _>>()?,
            counters: reply.counters.into_iter().collect(),
            uptime: Duration::from_millis(reply.uptime_ms),
            namespaces: reply.namespaces,
            media: reply
                .media
                .into_iter()
                .map(read_medium)
                .collect::<Result<_, _>>()?,
            problems: reply.problems,
        })
    }

    /// Makes the pool forget a medium that no connected node has. A medium with copies of blocks is forgotten
    /// only if `with_copies` is set, and the copies are lost.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`]. After an error the medium may be forgotten all the same: ask
    /// [`Client::stats`].
    pub async fn detach_medium(
        &self,
        medium: MediumId,
        with_copies: bool,
    ) -> Result<Detached, ControlError> {
        let request = DetachMediumRequest {
            caller: None,
            medium_id: medium.to_bytes().to_vec().into(),
            with_copies,
        };
        let call = Call::by(self.control_deadline()).unless_done();
        let reply = self.inner.control.call(request, call).await?;
        match DetachOutcome::try_from(reply.outcome) {
            Ok(DetachOutcome::DetachDone) => Ok(Detached::Done(reply.copies)),
            Ok(DetachOutcome::DetachUnknown) => Ok(Detached::Unknown),
            Ok(DetachOutcome::DetachConnected) => Ok(Detached::Connected(reply.node)),
            Ok(DetachOutcome::DetachHasCopies) => Ok(Detached::HasCopies(reply.copies)),
            Err(_) => Err(malformed(format!("unknown outcome {}", reply.outcome))),
        }
    }

    async fn remove_at_master(&self, what: &Remove, force: bool) -> Result<Removed, RemoveError> {
        let deadline = self.control_deadline();
        let call = async |what: What| -> Result<RemoveReply, RemoveError> {
            let request = RemoveRequest {
                caller: None,
                what: Some(what),
                force,
            };
            let mut unknown = false;
            let call = Call::by(deadline).unless_done();
            let called = self.inner.control.call_noting(request, call, &mut unknown);
            called.await.map_err(|error| {
                if unknown && error.is_retryable() {
                    RemoveError::OutcomeUnknown(error)
                } else {
                    error.into()
                }
            })
        };
        let mut removed = Removed::default();
        let whole = match what {
            Remove::Keys(keys) => {
                let mut failed = None;
                let mut answered = keys.is_empty();
                for keys in self.runs(keys) {
                    let reply = call(What::Keys(pack(keys).into())).await.and_then(|reply| {
                        expect_answers(reply.codes.len(), keys.len())?;
                        Ok(reply)
                    });
                    match reply {
                        Ok(reply) => {
                            answered = true;
                            removed.removed += reply.removed;
                            removed.kept += reply.kept;
                            removed.codes.extend(reply.codes.into_iter().map(code_of));
                        }
                        Err(error) => {
                            let codes = std::iter::repeat_n(error.code(), keys.len());
                            removed.codes.extend(codes);
                            failed = Some(error);
                        }
                    }
                }
                return match failed {
                    Some(error) if !answered => Err(error),
                    _ => Ok(removed),
                };
            }
            Remove::Pattern(pattern) => What::Pattern(pattern.clone()),
            Remove::Namespace => What::Namespace(true),
            Remove::Everything => What::Everything(true),
        };
        let reply = call(whole).await?;
        removed.removed = reply.removed;
        removed.kept = reply.kept;
        Ok(removed)
    }

    /// Packs keys one by one, for [`Client::exist_packed`] and [`Client::match_prefix_packed`].
    pub fn packer(&self) -> PackedKeys {
        PackedKeys::new(self.inner.message_limits())
    }

    fn pack(&self, keys: &[Key]) -> PackedKeys {
        let mut packed = self.packer();
        keys.iter().for_each(|key| packed.push(key.as_ref()));
        packed
    }

    /// Splits keys into runs, each of which fits one message.
    fn runs<'k>(&self, keys: &'k [Key]) -> Vec<&'k [Key]> {
        self.inner
            .message_limits()
            .split_keys(keys)
            .into_iter()
            .filter_map(|run| keys.get(run))
            .collect()
    }

    pub(crate) fn control_deadline(&self) -> Deadline {
        Deadline::after(self.inner.options.timeouts.control)
    }

    fn lease(&self, parts: Vec<LeasePart>) -> Lease {
        Lease::new(
            std::sync::Arc::clone(&self.inner.releases),
            self.inner.options.timeouts.control,
            parts,
        )
    }
}

/// The first `count` bits of `bytes`, lowest bit first.
fn read_bits(bytes: &[u8], count: usize) -> Result<Vec<bool>, ControlError> {
    expect_answers(bytes.len(), count.div_ceil(8))?;
    let bit = |at: usize| {
        bytes
            .get(at / 8)
            .is_some_and(|byte| byte >> (at % 8) & 1 == 1)
    };
    Ok((0..count).map(bit).collect())
}

fn read_description(wire: kvpool_proto::Description) -> Result<Option<Description>, ControlError> {
    match code_of(wire.code) {
        Code::Ok => {}
        Code::Missing => return Ok(None),
        other => {
            return Err(ControlError::new(
                other,
                "the master refused to describe the key",
            ));
        }
    }
    let length = Length(wire.length);
    let replicas = wire
        .replicas
        .into_iter()
        .map(|replica| DescribedReplica {
            node: replica.node,
            extent: Extent {
                segment: SegmentId(replica.segment),
                offset: Offset(replica.offset),
                length,
            },
            state: replica.state,
        })
        .collect();
    Ok(Some(Description {
        length,
        checksum: Checksum(wire.checksum),
        version: Version(wire.version),
        replicas,
        lease_left: Duration::from_millis(wire.lease_left_ms),
        soft_pin_left: Duration::from_millis(wire.soft_pin_left_ms),
        hard_pin: wire.hard_pin,
    }))
}

fn read_node(wire: kvpool_proto::NodeStats) -> Result<NodeStats, ControlError> {
    let incarnation = Incarnation::from_slice(&wire.incarnation)
        .ok_or_else(|| malformed(format!("node {:?} has an invalid id", wire.name)))?;
    Ok(NodeStats {
        name: wire.name,
        state: wire.state,
        incarnation,
        data_address: wire.data_address,
        shm_path: wire.shm_path,
        heartbeat_age: Duration::from_millis(wire.heartbeat_age_ms),
        problems: wire.problems,
        left_blocks: wire.left_blocks,
        version: wire.version,
        media_leave: wire.media_leave,
        segments: wire
            .segments
            .into_iter()
            .map(|segment| SegmentStats {
                id: SegmentId(segment.id),
                capacity: Length(segment.capacity_bytes),
                used: Length(segment.used_bytes),
                quarantine: Length(segment.quarantine_bytes),
                free_ranges: segment.free_ranges,
                largest_free: Length(segment.largest_free_bytes),
            })
            .collect(),
    })
}

fn read_medium(wire: kvpool_proto::MediumStats) -> Result<MediumStats, ControlError> {
    let id = MediumId::from_slice(&wire.medium_id).ok_or_else(|| {
        malformed(format!(
            "a medium of node {:?} has an invalid id",
            wire.node
        ))
    })?;
    Ok(MediumStats {
        id,
        segment: SegmentId(wire.segment),
        node: wire.node,
        state: wire.state,
        generation: wire.generation,
        capacity: Length(wire.capacity_bytes),
        used: Length(wire.used_bytes),
        copies: wire.copies,
        zone: wire.zone,
        zone_size: Length(wire.zone_bytes),
        path: wire.path,
        reason: wire.reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_read_lowest_first_and_no_further_than_asked() {
        let bits = read_bits(&[0b0000_0101, 0b1111_1110], 10).unwrap();
        let set: Vec<usize> = (0..10).filter(|at| bits[*at]).collect();
        assert_eq!(set, [0, 2, 9]);
        assert_eq!(bits.len(), 10);
        assert_eq!(read_bits(&[0], 9).unwrap_err().code, Code::Malformed);
        assert_eq!(read_bits(&[0, 0], 8).unwrap_err().code, Code::Malformed);
    }
}
