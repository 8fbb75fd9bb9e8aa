//! A master that behaves as it is told. It keeps what is asked of it, for tests to look at.

use super::role::{Own, Role};
use kvpool_proto::pool_server::Pool;
use kvpool_proto::*;
use kvpool_types::wire::keys::unpack;
use kvpool_types::{ClusterId, Code, HostId, Incarnation};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The two nodes of a fake pool, by their incarnations.
pub(crate) const NODES: [u128; 2] = [1, 2];

/// What goes wrong with one commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommitFault {
    /// It is made, and its answer is lost.
    AnswerLost,
    /// It is made, and answered by a master that takes an earlier epoch for the latest.
    AnsweredByOld,
    /// Every block of it is refused with this.
    Refused(Code),
}

/// Whether reservations of one extent each are answered in columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Columns {
    /// Never: a master from before there were any.
    Never,
    /// Where the request allows it.
    Allowed,
    /// The same, and one of them is short.
    Short,
}

/// One master; those of one pool share what the pool is.
#[derive(Debug, Default)]
pub(crate) struct Master {
    pool: Arc<Mutex<State>>,
    own: Mutex<Own>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) epoch: u64,
    pub(crate) lease_ttl_ms: u64,
    pub(crate) max_batch_keys: u32,
    /// Whether the nodes are on the host of whoever asks.
    pub(crate) is_near: bool,
    /// Whether renewals work.
    pub(crate) renews: bool,
    /// Keys whose leases are not renewed even so.
    pub(crate) unrenewed: HashSet<String>,
    /// Whether a replica that was reported unreachable is hidden.
    pub(crate) hides: bool,
    /// The codes that the next reserves of a key are answered with.
    pub(crate) reserve_codes: HashMap<String, VecDeque<Code>>,
    /// Keys that another client is forever writing.
    pub(crate) in_progress: HashSet<String>,
    /// Whether single replicas go to one node after the other; else all to the first.
    pub(crate) alternates: bool,
    pub(crate) columns: Columns,
    /// How many commits came in columns.
    pub(crate) commits_in_columns: usize,
    pub(crate) commit_faults: VecDeque<CommitFault>,
    /// How many reserves are carried out and not answered.
    pub(crate) lost_reserves: usize,
    /// What each reserve was named, and which it came instead of.
    pub(crate) reserves: Vec<(u64, Vec<u64>)>,
    /// Which of the next removals are carried out and not answered.
    pub(crate) lost_removals: VecDeque<bool>,
    /// How many holders each key's lease has, as far as the client can know.
    pub(crate) holders: HashMap<String, i64>,
    /// The keys and versions that releases named.
    pub(crate) released: Vec<(String, u64)>,
    /// Whether reports are never answered.
    pub(crate) report_hangs: bool,
    pub(crate) release_fails: bool,
    /// Whether releases are carried out and never answered.
    pub(crate) release_hangs: bool,
    pub(crate) blocks: HashMap<String, Block>,
    pub(crate) reservations: HashMap<u64, (String, Vec<u32>, u64)>,
    pub(crate) next: u64,
    /// Commits in the order they came: the keys of each.
    pub(crate) commits: Vec<Vec<String>>,
    /// The parent that each committed block was linked to.
    pub(crate) parents: HashMap<String, String>,
    pub(crate) revoked: Vec<u64>,
    pub(crate) reports: Vec<ReportedReplica>,
    /// How often each method was called.
    pub(crate) calls: HashMap<&'static str, usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) version: u64,
    pub(crate) length: u64,
    pub(crate) checksum: u64,
    /// The replicas' segments: segment n lies on node n.
    pub(crate) segments: Vec<u32>,
    pub(crate) offset: u64,
}

impl Default for State {
    fn default() -> Self {
        Self {
            epoch: 1,
            lease_ttl_ms: 60_000,
            max_batch_keys: 1000,
            is_near: false,
            renews: true,
            unrenewed: HashSet::new(),
            hides: true,
            reserve_codes: HashMap::new(),
            in_progress: HashSet::new(),
            alternates: false,
            columns: Columns::Never,
            commits_in_columns: 0,
            commit_faults: VecDeque::new(),
            lost_removals: VecDeque::new(),
            holders: HashMap::new(),
            released: Vec::new(),
            report_hangs: false,
            release_fails: false,
            release_hangs: false,
            blocks: HashMap::new(),
            reservations: HashMap::new(),
            next: 1,
            lost_reserves: 0,
            reserves: Vec::new(),
            commits: Vec::new(),
            parents: HashMap::new(),
            revoked: Vec::new(),
            reports: Vec::new(),
            calls: HashMap::new(),
        }
    }
}

impl Master {
    /// Another master of the pool of this one.
    pub(crate) fn beside(&self, role: Role) -> Self {
        Self {
            pool: Arc::clone(&self.pool),
            own: Mutex::new(Own {
                role,
                ..Own::default()
            }),
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.pool.lock()
    }

    /// What is this master's alone.
    pub(crate) fn own(&self) -> MutexGuard<'_, Own> {
        self.own.lock()
    }

    /// How often a method was called at any master of the pool.
    pub(crate) fn calls(&self, method: &'static str) -> usize {
        self.state().calls.get(method).copied().unwrap_or(0)
    }

    /// How often it was called at this one.
    pub(crate) fn own_calls(&self, method: &'static str) -> usize {
        self.own().calls.get(method).copied().unwrap_or(0)
    }

    fn called(&self, method: &'static str) -> MutexGuard<'_, State> {
        self.count(method);
        let mut state = self.state();
        *state.calls.entry(method).or_default() += 1;
        state
    }

    fn count(&self, method: &'static str) {
        *self.own().calls.entry(method).or_default() += 1;
    }

    fn lease(&self, state: &State) -> Option<Lease> {
        let unleased = matches!(self.own().role, Role::ReadOnly(_));
        Some(Lease {
            token: 1,
            ttl_ms: if unleased { 0 } else { state.lease_ttl_ms },
            newest: state.next - 1,
        })
    }
}

impl State {
    fn lease_present(&mut self, keys: &[String]) {
        for key in keys.iter().filter(|key| self.blocks.contains_key(*key)) {
            *self.holders.entry(key.clone()).or_default() += 1;
        }
    }

    /// How many holders the leases have together.
    pub(crate) fn all_holders(&self) -> i64 {
        self.holders.values().sum()
    }

    /// Ends the term: what it granted is void.
    pub(crate) fn fail_over(&mut self) {
        self.epoch += 1;
        self.reservations.clear();
    }
}

fn keys(packed: &[u8]) -> Vec<String> {
    unpack(packed).map(|key| key.unwrap().to_string()).collect()
}

fn nodes(state: &State) -> Vec<NodeAddress> {
    let host = kvpool_transport::machine::host_id().unwrap();
    let (host, socket) = if state.is_near {
        (host, "socket")
    } else {
        (HostId(77), "")
    };
    NODES
        .iter()
        .map(|id| NodeAddress {
            name: format!("n{id}"),
            incarnation: Incarnation(*id).to_bytes().to_vec().into(),
            data_address: "127.0.0.1:1".to_owned(),
            shm_path: socket.to_owned(),
            host_id: host.to_bytes().to_vec().into(),
        })
        .collect()
}

pub(super) fn coded(code: Code) -> Status {
    let mut status = Status::failed_precondition("as told");
    let value = code.to_wire().to_string().parse().unwrap();
    status.metadata_mut().insert(CODE_METADATA, value);
    status
}

fn wire(code: Code) -> u32 {
    code.to_wire().into()
}

/// Refuses or passes on what is not for this master.
macro_rules! admit {
    ($self:ident, $request:ident, $method:ident, $changes:literal) => {
        let caller = $request.get_ref().caller.as_ref();
        let passed = $self.own().passes_on(caller, $changes);
        if passed.is_err() {
            $self.count("refused");
        }
        if let Some(leader) = passed? {
            $self.count("passed on");
            return leader.$method($request).await;
        }
    };
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Pool for Master {
    async fn hello(&self, request: Request<HelloRequest>) -> Answer<HelloReply> {
        admit!(self, request, hello, false);
        let state = self.called("hello");
        if let Some(hello) = &self.own().hello {
            let hello = prost::Message::decode(hello.as_slice()).unwrap();
            return Ok(Response::new(hello));
        }
        Ok(Response::new(HelloReply {
            version: 1,
            cluster_id: ClusterId(5).to_bytes().to_vec().into(),
            epoch: state.epoch,
            lease_ttl_ms: state.lease_ttl_ms,
            max_block_bytes: 1 << 30,
            max_batch_keys: state.max_batch_keys,
            checksum_algorithm: 1,
            features: 0,
        }))
    }

    async fn create_namespace(
        &self,
        request: Request<CreateNamespaceRequest>,
    ) -> Answer<CreateNamespaceReply> {
        admit!(self, request, create_namespace, true);
        Ok(Response::new(CreateNamespaceReply {
            epoch: self.called("namespace").epoch,
            created: true,
        }))
    }

    async fn reserve(&self, request: Request<ReserveRequest>) -> Answer<ReserveReply> {
        admit!(self, request, reserve, true);
        let request = request.into_inner();
        let mut state = self.called("reserve");
        let named = (request.request, request.instead_of.clone());
        state.reserves.push(named);
        if state.lost_reserves > 0 {
            state.lost_reserves -= 1;
            return Err(Status::unavailable("the answer is lost"));
        }
        let mut reservations = Vec::new();
        for key in keys(&request.keys) {
            let told = state
                .reserve_codes
                .get_mut(&key)
                .and_then(VecDeque::pop_front);
            let code = match told {
                Some(code) => code,
                None if state.in_progress.contains(&key) => Code::InProgress,
                None if state.blocks.contains_key(&key) && !request.upsert => Code::Exists,
                None => Code::Ok,
            };
            if code != Code::Ok {
                reservations.push(Reservation {
                    code: wire(code),
                    ..Reservation::default()
                });
                continue;
            }
            let version = state.next;
            state.next += 1;
            let segments: Vec<u32> = if state.alternates {
                vec![u32::from(version.is_multiple_of(2))]
            } else {
                (0..request.replicas.clamp(1, 2)).collect()
            };
            reservations.push(Reservation {
                code: 0,
                version,
                extents: segments
                    .iter()
                    .map(|segment| GrantedExtent {
                        node: *segment,
                        segment: *segment,
                        offset: version * 4096,
                        mac: vec![0; 16].into(),
                    })
                    .collect(),
            });
            state
                .reservations
                .insert(version, (key, segments, version * 4096));
        }
        let mut columns = None;
        if request.columns && state.columns != Columns::Never {
            columns = in_columns(&reservations);
        }
        if let (Some(columns), Columns::Short) = (&mut columns, state.columns) {
            columns.offsets.pop();
        }
        if columns.is_some() {
            reservations.clear();
        }
        Ok(Response::new(ReserveReply {
            epoch: state.epoch,
            nodes: nodes(&state),
            reservations,
            grant_ttl_ms: request.grant_ttl_ms,
            columns,
        }))
    }

    async fn commit(&self, request: Request<CommitRequest>) -> Answer<Outcomes> {
        admit!(self, request, commit, true);
        let mut request = request.into_inner();
        let mut state = self.called("commit");
        if let Some(columns) = request.columns.take() {
            assert!(state.columns != Columns::Never && request.items.is_empty());
            state.commits_in_columns += 1;
            request.items = (0..columns.versions.len())
                .map(|at| CommitItem {
                    version: columns.versions[at],
                    length: columns.lengths[at],
                    checksum: columns.checksums[at],
                    segments: vec![columns.segments[at]],
                    parent: columns.parents[at],
                })
                .collect();
        }
        if request.caller.as_ref().unwrap().epoch != state.epoch {
            return Err(coded(Code::StaleEpoch));
        }
        let fault = state.commit_faults.pop_front();
        let mut named = keys(&request.keys);
        let items = named.len();
        named.extend(keys(&request.parents));
        state.commits.push(named[..items].to_vec());
        let mut codes = Vec::new();
        for (key, item) in named.iter().zip(&request.items) {
            if let Some(CommitFault::Refused(code)) = fault {
                codes.push(wire(code));
                continue;
            }
            let present = state.blocks.get(key).map(|block| block.version);
            let Some((reserved, _, offset)) = state.reservations.remove(&item.version) else {
                let repeated = present == Some(item.version);
                codes.push(wire(if repeated { Code::Ok } else { Code::GrantEnded }));
                continue;
            };
            assert_eq!(&reserved, key);
            assert!(!item.segments.is_empty());
            state.blocks.insert(
                key.clone(),
                Block {
                    version: item.version,
                    length: item.length,
                    checksum: item.checksum,
                    segments: item.segments.clone(),
                    offset,
                },
            );
            if let Some(parent) = (item.parent as usize).checked_sub(1)
                && state.blocks.contains_key(&named[parent])
            {
                state.parents.insert(key.clone(), named[parent].clone());
            }
            codes.push(0);
        }
        if fault == Some(CommitFault::AnswerLost) {
            return Err(Status::unavailable("the answer is lost"));
        }
        let age = u64::from(fault == Some(CommitFault::AnsweredByOld));
        Ok(Response::new(Outcomes {
            epoch: state.epoch - age,
            codes,
        }))
    }

    async fn revoke(&self, request: Request<RevokeRequest>) -> Answer<Outcomes> {
        admit!(self, request, revoke, true);
        let request = request.into_inner();
        let mut state = self.called("revoke");
        for version in &request.versions {
            state.reservations.remove(version);
        }
        let codes = vec![0; request.versions.len()];
        state.revoked.extend(request.versions);
        Ok(Response::new(Outcomes {
            epoch: state.epoch,
            codes,
        }))
    }

    async fn lookup(&self, request: Request<LookupRequest>) -> Answer<LookupReply> {
        admit!(self, request, lookup, false);
        let mut state = self.called("lookup");
        let asked = keys(&request.into_inner().keys);
        state.lease_present(&asked);
        let locations = asked
            .iter()
            .map(|key| match state.blocks.get(key) {
                Some(block) if !block.segments.is_empty() => Location {
                    code: 0,
                    length: block.length,
                    checksum: block.checksum,
                    version: block.version,
                    replicas: block
                        .segments
                        .iter()
                        .map(|segment| ReplicaLocation {
                            node: *segment,
                            segment: *segment,
                            offset: block.offset,
                        })
                        .collect(),
                },
                _ => Location {
                    code: wire(Code::Missing),
                    ..Location::default()
                },
            })
            .collect();
        Ok(Response::new(LookupReply {
            epoch: state.epoch,
            nodes: nodes(&state),
            locations,
            lease: self.lease(&state),
        }))
    }

    async fn exist(&self, request: Request<ExistRequest>) -> Answer<ExistReply> {
        admit!(self, request, exist, false);
        let mut state = self.called("exist");
        let keys = keys(&request.into_inner().keys);
        state.lease_present(&keys);
        assert!(keys.len() <= state.max_batch_keys as usize);
        let mut present = vec![0u8; keys.len().div_ceil(8)];
        for (at, key) in keys.iter().enumerate() {
            if state.blocks.contains_key(key) {
                present[at / 8] |= 1 << (at % 8);
            }
        }
        Ok(Response::new(ExistReply {
            epoch: state.epoch,
            present: present.into(),
            lease: self.lease(&state),
        }))
    }

    async fn match_prefix(&self, request: Request<MatchPrefixRequest>) -> Answer<MatchPrefixReply> {
        admit!(self, request, match_prefix, false);
        let mut state = self.called("match_prefix");
        let keys = keys(&request.into_inner().keys);
        let blocks = keys
            .iter()
            .take_while(|key| state.blocks.contains_key(*key))
            .count();
        state.lease_present(&keys[..blocks]);
        Ok(Response::new(MatchPrefixReply {
            epoch: state.epoch,
            blocks: u32::try_from(blocks).unwrap(),
            lease: self.lease(&state),
        }))
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Answer<RenewReply> {
        admit!(self, request, renew, true);
        let state = self.called("renew");
        let keys = keys(&request.into_inner().keys);
        let renewed = |key: &String| match state.renews && !state.unrenewed.contains(key) {
            true => wire(Code::Ok),
            false => wire(Code::LeaseEnded),
        };
        Ok(Response::new(RenewReply {
            epoch: state.epoch,
            codes: keys.iter().map(renewed).collect(),
            lease: self.lease(&state),
        }))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Answer<Outcomes> {
        admit!(self, request, release, true);
        let request = request.into_inner();
        let keys = keys(&request.keys);
        let (fails, hangs, epoch) = {
            let mut state = self.called("release");
            for (key, version) in keys.iter().zip(&request.versions) {
                *state.holders.entry(key.clone()).or_default() -= 1;
                state.released.push((key.clone(), *version));
            }
            (state.release_fails, state.release_hangs, state.epoch)
        };
        if hangs {
            std::future::pending::<()>().await;
        }
        if fails {
            return Err(Status::unavailable("the answer is lost"));
        }
        let codes = vec![0; keys.len()];
        Ok(Response::new(Outcomes { epoch, codes }))
    }

    async fn remove(&self, request: Request<RemoveRequest>) -> Answer<RemoveReply> {
        admit!(self, request, remove, true);
        let mut state = self.called("remove");
        let Some(remove_request::What::Keys(packed)) = request.into_inner().what else {
            return Err(coded(Code::InvalidArgument));
        };
        let codes: Vec<u32> = keys(&packed)
            .iter()
            .map(|key| match state.blocks.remove(key) {
                Some(_) => 0,
                None => wire(Code::Missing),
            })
            .collect();
        if state.lost_removals.pop_front() == Some(true) {
            return Err(Status::unavailable("the answer is lost"));
        }
        Ok(Response::new(RemoveReply {
            epoch: state.epoch,
            removed: codes.iter().filter(|code| **code == 0).count() as u64,
            kept: 0,
            codes,
        }))
    }

    async fn list(&self, _: Request<ListRequest>) -> Answer<ListReply> {
        Err(coded(Code::InvalidArgument))
    }

    async fn describe(&self, request: Request<DescribeRequest>) -> Answer<DescribeReply> {
        admit!(self, request, describe, false);
        let state = self.called("describe");
        let missing = |_| Description {
            code: wire(Code::Missing),
            ..Description::default()
        };
        Ok(Response::new(DescribeReply {
            epoch: state.epoch,
            descriptions: keys(&request.get_ref().keys).iter().map(missing).collect(),
        }))
    }

    async fn report_replicas(&self, request: Request<ReportReplicasRequest>) -> Answer<Outcomes> {
        admit!(self, request, report_replicas, false);
        let hangs = self.state().report_hangs;
        if hangs {
            std::future::pending::<()>().await;
        }
        let request = request.into_inner();
        let mut state = self.called("report");
        for (key, report) in keys(&request.keys).iter().zip(&request.reports) {
            if state.hides
                && let Some(block) = state.blocks.get_mut(key)
            {
                block.segments.retain(|segment| *segment != report.segment);
            }
        }
        let codes = vec![0; request.reports.len()];
        state.reports.extend(request.reports);
        Ok(Response::new(Outcomes {
            epoch: state.epoch,
            codes,
        }))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Answer<StatsReply> {
        Err(coded(Code::InvalidArgument))
    }

    async fn cluster(&self, _: Request<ClusterRequest>) -> Answer<ClusterReply> {
        self.count("cluster");
        let slow = self.own().slow;
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        let epoch = self.state().epoch;
        self.own().cluster(epoch).map(Response::new)
    }
}

/// The same in columns; `None` when one has several extents.
fn in_columns(reservations: &[Reservation]) -> Option<ReservationColumns> {
    let mut columns = ReservationColumns::default();
    let mut macs = Vec::new();
    for reservation in reservations {
        let nothing = GrantedExtent {
            mac: vec![0; 16].into(),
            ..GrantedExtent::default()
        };
        let extent = match &reservation.extents[..] {
            [] => &nothing,
            [extent] => extent,
            _ => return None,
        };
        columns.codes.push(reservation.code);
        columns.versions.push(reservation.version);
        columns.nodes.push(extent.node);
        columns.segments.push(extent.segment);
        columns.offsets.push(extent.offset);
        macs.extend_from_slice(&extent.mac);
    }
    columns.macs = macs.into();
    Some(columns)
}
