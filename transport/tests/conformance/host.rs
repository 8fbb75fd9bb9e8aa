//! A small store node for tests: one real segment, real proofs, real fencing.

use kvpool_transport::checksum::sum_shared;
use kvpool_transport::host::{
    Abort, Admission, Host, Peer, RdmaHost, Refused, ShmHost, WriteGuard,
};
use kvpool_transport::memory::{Region, Slice, create_segment, read_only_fd};
use kvpool_transport::shm::board::Board;
use kvpool_types::wire::data::{Hello, HelloReply, ReadItem, WriteRequest};
use kvpool_types::{
    Checksum, ChecksumAlgorithm, ClientId, ClusterId, Code, Epoch, Extent, Grant, GrantId,
    GrantKey, HostId, Incarnation, Length, NodeName, Offset, SegmentId,
};
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

pub(crate) const SEGMENT: SegmentId = SegmentId(3);
pub(crate) const CLUSTER: ClusterId = ClusterId(0xc1);
pub(crate) const CLIENT: ClientId = ClientId(0xc11e);

pub(crate) struct TestHost {
    me: Weak<TestHost>,
    key: GrantKey,
    fd: OwnedFd,
    pub(crate) region: Region,
    state: Mutex<TestHostState>,
    changed: Condvar,
}

/// The holdings at one moment.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    /// Extents that are being received into.
    pub(crate) receiving: usize,
    /// Announced writes through shared memory.
    pub(crate) shm_writes: usize,
    /// Extents with pins.
    pub(crate) pins: usize,
    /// Processes reported as exited.
    pub(crate) gone: usize,
}

#[derive(Default)]
struct TestHostState {
    epoch: Epoch,
    incarnation: Incarnation,
    next_grant: u64,
    next_offset: u64,
    fenced: HashSet<GrantId>,
    written: HashSet<GrantId>,
    sums: HashMap<Offset, Vec<Checksum>>,
    receiving: HashMap<GrantId, Arc<dyn Abort>>,
    /// The connections whose devices may touch the memory.
    touching: Vec<Weak<dyn Abort>>,
    shm_writes: HashMap<GrantId, (ClientId, Offset)>,
    pins: HashMap<Offset, (ClientId, u32)>,
    gone: Vec<ClientId>,
    /// The boards that were created, with their clients.
    boards: Vec<(ClientId, Arc<Board>)>,
    boardless: bool,
    /// While true, admissions wait.
    blocked: bool,
    counted: (u64, u64),
    /// The number of requests for the checksums of an extent.
    summed: usize,
}

impl TestHost {
    pub(crate) fn new(size: Length) -> Arc<Self> {
        let (fd, region) = create_segment(size, false, "kvpool-conformance").unwrap();
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            key: GrantKey([9; 32]),
            fd,
            region,
            state: Mutex::new(TestHostState {
                epoch: Epoch(5),
                incarnation: Incarnation(77),
                ..TestHostState::default()
            }),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn hello(&self) -> Hello {
        Hello {
            min_version: kvpool_types::wire::frame::MIN_VERSION,
            max_version: kvpool_types::wire::frame::VERSION,
            cluster: CLUSTER,
            client: CLIENT,
            incarnation: Incarnation(0),
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token: kvpool_types::Token::default(),
        }
    }

    /// A grant for a new extent.
    pub(crate) fn grant(&self, length: u64) -> Grant {
        let mut state = self.state.lock();
        state.next_grant += 1;
        let extent = Extent {
            segment: SEGMENT,
            offset: Offset(state.next_offset),
            length: Length(length),
        };
        state.next_offset += length.next_multiple_of(4096);
        assert!(
            state.next_offset <= self.region.length().0,
            "the test's segment is full"
        );
        self.key.sign(
            state.incarnation,
            state.epoch,
            GrantId(state.next_grant),
            extent,
        )
    }

    /// A grant for an extent that the caller chose.
    pub(crate) fn grant_of(&self, extent: Extent) -> Grant {
        let mut state = self.state.lock();
        state.next_grant += 1;
        let id = GrantId(state.next_grant);
        self.key.sign(state.incarnation, state.epoch, id, extent)
    }

    /// A stored block.
    pub(crate) fn stored(&self, bytes: &[u8]) -> Extent {
        let grant = self.grant(bytes.len() as u64);
        let slice = self.slice(&grant.extent);
        slice.write_at(Offset(0), bytes);
        let sums = sum_shared(&slice).chunks;
        let mut state = self.state.lock();
        state.written.insert(grant.id);
        state.sums.insert(grant.extent.offset, sums);
        grant.extent
    }

    pub(crate) fn slice(&self, extent: &Extent) -> Slice {
        self.region.slice(extent.offset, extent.length).unwrap()
    }

    pub(crate) fn set_epoch(&self, epoch: Epoch) {
        let mut state = self.state.lock();
        state.epoch = epoch;
        for (_, board) in &state.boards {
            board.open(epoch);
        }
    }

    pub(crate) fn set_incarnation(&self, incarnation: Incarnation) {
        let mut state = self.state.lock();
        state.incarnation = incarnation;
        for (_, board) in &state.boards {
            board.close();
        }
        for connection in std::mem::take(&mut state.touching) {
            if let Some(connection) = connection.upgrade() {
                connection.abort();
            }
        }
    }

    /// Refuses further boards, like a node without boards.
    pub(crate) fn without_boards(&self) {
        self.state.lock().boardless = true;
    }

    /// The pins on all boards.
    pub(crate) fn on_boards(&self) -> Vec<Extent> {
        let mut pinned = Vec::new();
        for (_, board) in &self.state.lock().boards {
            board.look(|extent| pinned.push(extent));
        }
        pinned
    }

    /// The number of boards, and of those without a connection.
    pub(crate) fn boards(&self) -> (usize, usize) {
        let state = self.state.lock();
        let left = |board: &&(ClientId, Arc<Board>)| Arc::strong_count(&board.1) == 1;
        (state.boards.len(), state.boards.iter().filter(left).count())
    }

    pub(crate) fn block(&self, blocked: bool) {
        self.state.lock().blocked = blocked;
        self.changed.notify_all();
    }

    /// Closes a grant. True once nothing can touch its extent; false when that took longer than
    /// `wait`.
    pub(crate) fn fence(&self, grant: GrantId, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        let mut state = self.state.lock();
        state.fenced.insert(grant);
        if let Some(abort) = state.receiving.get(&grant) {
            abort.abort();
        }
        while state.receiving.contains_key(&grant) || state.shm_writes.contains_key(&grant) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// Waits until `reached` holds; false when that took too long.
    pub(crate) fn wait_for(&self, reached: impl Fn(Held) -> bool) -> bool {
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut state = self.state.lock();
        loop {
            let held = Held {
                receiving: state.receiving.len(),
                shm_writes: state.shm_writes.len(),
                pins: state.pins.len(),
                gone: state.gone.len(),
            };
            if reached(held) {
                return true;
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return false;
            }
        }
    }

    pub(crate) fn counted(&self) -> (u64, u64) {
        self.state.lock().counted
    }

    pub(crate) fn summed(&self) -> usize {
        self.state.lock().summed
    }

    pub(crate) fn is_written(&self, grant: GrantId) -> bool {
        self.state.lock().written.contains(&grant)
    }

    fn judge(state: &TestHostState, epoch: Epoch, incarnation: Incarnation) -> Code {
        if incarnation != state.incarnation {
            Code::WrongIncarnation
        } else if epoch < state.epoch {
            Code::StaleEpoch
        } else {
            Code::Ok
        }
    }

    fn judge_write(&self, state: &TestHostState, incarnation: Incarnation, grant: &Grant) -> Code {
        let code = Self::judge(state, grant.epoch, incarnation);
        if code != Code::Ok {
            return code;
        }
        if !self.key.verify(state.incarnation, grant) {
            return Code::GrantRefused;
        }
        if grant.extent.segment != SEGMENT
            || grant.extent.end().unwrap() > Offset(self.region.length().0)
        {
            return Code::OutOfRange;
        }
        if state.fenced.contains(&grant.id) {
            return Code::GrantEnded;
        }
        let busy = state.receiving.contains_key(&grant.id)
            || state.shm_writes.contains_key(&grant.id)
            || state.written.contains(&grant.id);
        if busy { Code::AlreadyWritten } else { Code::Ok }
    }
}

fn refused(code: Code) -> Refused {
    Refused {
        code,
        message: "refused by the test's host".to_owned(),
    }
}

struct Guard {
    host: Arc<TestHost>,
    grant: Grant,
    target: Slice,
}

impl WriteGuard for Guard {
    fn parts(&self) -> &[Slice] {
        std::slice::from_ref(&self.target)
    }

    fn finish(self: Box<Self>, sums: Vec<Checksum>) -> Code {
        let mut state = self.host.state.lock();
        if state.fenced.contains(&self.grant.id) {
            return Code::GrantEnded;
        }
        state.written.insert(self.grant.id);
        state.sums.insert(self.grant.extent.offset, sums);
        Code::Ok
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.host.state.lock().receiving.remove(&self.grant.id);
        self.host.changed.notify_all();
    }
}

/// A small write is performed at once, so there is no receive to abort.
struct NoAbort;

impl Abort for NoAbort {
    fn abort(&self) {}
}

impl Host for TestHost {
    fn hello(&self, hello: &Hello) -> Result<HelloReply, Refused> {
        let state = self.state.lock();
        if hello.cluster != CLUSTER {
            return Err(refused(Code::WrongCluster));
        }
        if hello.incarnation != Incarnation(0) && hello.incarnation != state.incarnation {
            return Err(refused(Code::WrongIncarnation));
        }
        Ok(HelloReply {
            version: hello.max_version,
            cluster: CLUSTER,
            node: NodeName("test".to_owned()),
            incarnation: state.incarnation,
            host: HostId(1),
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            features: kvpool_types::wire::features::Features::default(),
        })
    }

    fn epoch(&self) -> Epoch {
        self.state.lock().epoch
    }

    fn admit_read(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
        _abort: &Arc<dyn Abort>,
    ) -> Result<Slice, Refused> {
        let mut state = self.state.lock();
        while state.blocked {
            self.changed.wait(&mut state);
        }
        let code = Self::judge(&state, epoch, incarnation);
        if code != Code::Ok {
            return Err(refused(code));
        }
        self.region
            .slice(item.extent.offset, item.extent.length)
            .filter(|_| item.extent.segment == SEGMENT)
            .and_then(|extent| extent.slice(item.from, item.length))
            .ok_or_else(|| refused(Code::OutOfRange))
    }

    fn admit_write(
        &self,
        incarnation: Incarnation,
        grant: &Grant,
        abort: Arc<dyn Abort>,
    ) -> Admission {
        let mut state = self.state.lock();
        while state.blocked {
            self.changed.wait(&mut state);
        }
        match self.judge_write(&state, incarnation, grant) {
            Code::Ok => {
                state.receiving.insert(grant.id, abort);
                self.changed.notify_all();
                Admission::Write(Box::new(Guard {
                    host: self.me.upgrade().unwrap(),
                    grant: *grant,
                    target: self.slice(&grant.extent),
                }))
            }
            code => Admission::Refuse(refused(code)),
        }
    }

    fn write_now(&self, request: &WriteRequest, payload: &[u8]) -> Vec<Code> {
        let blocks = request.blocks(payload);
        blocks
            .map(|block| {
                let abort: Arc<dyn Abort> = Arc::new(NoAbort);
                match self.admit_write(request.incarnation, block.grant, abort) {
                    Admission::Write(guard) => {
                        guard.write_at(Offset(0), block.bytes);
                        guard.finish(block.sums().collect())
                    }
                    Admission::Refuse(refused) => refused.code,
                }
            })
            .collect()
    }

    fn sums(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
    ) -> Result<Vec<Checksum>, Refused> {
        let extent = &item.extent;
        let mut state = self.state.lock();
        state.summed += 1;
        let code = Self::judge(&state, epoch, incarnation);
        if code != Code::Ok {
            return Err(refused(code));
        }
        let sums = state.sums.get(&extent.offset).cloned();
        sums.ok_or_else(|| refused(Code::OutOfRange))
    }

    fn count(&self, read: Length, written: Length) {
        let mut state = self.state.lock();
        state.counted.0 += read.0;
        state.counted.1 += written.0;
    }
}

impl RdmaHost for TestHost {
    fn memory(
        &self,
        incarnation: Incarnation,
        abort: Weak<dyn Abort>,
    ) -> Result<Vec<(SegmentId, Slice)>, Refused> {
        let mut state = self.state.lock();
        match Self::judge(&state, state.epoch, incarnation) {
            Code::Ok => {
                state.touching.push(abort);
                Ok(vec![(SEGMENT, self.region.whole())])
            }
            code => Err(refused(code)),
        }
    }
}

impl ShmHost for TestHost {
    fn map(
        &self,
        incarnation: Incarnation,
        segment: SegmentId,
        writable: bool,
    ) -> Result<(OwnedFd, Length), Refused> {
        let state = self.state.lock();
        let code = Self::judge(&state, state.epoch, incarnation);
        if code != Code::Ok {
            return Err(refused(code));
        }
        if segment != SEGMENT {
            return Err(refused(Code::OutOfRange));
        }
        let fd = if writable {
            self.fd.try_clone().unwrap()
        } else {
            read_only_fd(&self.fd).unwrap()
        };
        Ok((fd, self.region.length()))
    }

    fn board(
        &self,
        peer: &Peer,
        incarnation: Incarnation,
    ) -> Result<(Arc<Board>, OwnedFd), Refused> {
        let mut state = self.state.lock();
        if state.boardless {
            return Err(refused(Code::OutOfRange));
        }
        let code = Self::judge(&state, state.epoch, incarnation);
        if code != Code::Ok {
            return Err(refused(code));
        }
        let (board, fd) = Board::create(self.region.length()).unwrap();
        let board = Arc::new(board);
        board.open(state.epoch);
        state.boards.push((peer.client, board.clone()));
        Ok((board, fd))
    }

    fn begin_shm_writes(
        &self,
        peer: &Peer,
        incarnation: Incarnation,
        grants: &[Grant],
    ) -> Vec<Code> {
        let mut state = self.state.lock();
        while state.blocked {
            self.changed.wait(&mut state);
        }
        let begin = |grant: &Grant| {
            let code = self.judge_write(&state, incarnation, grant);
            if code == Code::Ok {
                let hold = (peer.client, grant.extent.offset);
                state.shm_writes.insert(grant.id, hold);
            }
            code
        };
        let codes = grants.iter().map(begin).collect();
        self.changed.notify_all();
        codes
    }

    fn end_shm_writes(&self, peer: &Peer, items: Vec<(GrantId, Vec<Checksum>)>) -> Vec<Code> {
        let mut state = self.state.lock();
        let end = |(grant, sums): (GrantId, Vec<Checksum>)| {
            let Some((client, offset)) = state.shm_writes.remove(&grant) else {
                return Code::GrantEnded;
            };
            assert_eq!(client, peer.client);
            if sums.is_empty() {
                return Code::Ok;
            }
            if state.fenced.contains(&grant) {
                return Code::GrantEnded;
            }
            state.written.insert(grant);
            state.sums.insert(offset, sums);
            Code::Ok
        };
        let codes = items.into_iter().map(end).collect();
        self.changed.notify_all();
        codes
    }

    fn pin(&self, peer: &Peer, epoch: Epoch, incarnation: Incarnation, extent: &Extent) -> Code {
        let mut state = self.state.lock();
        let code = Self::judge(&state, epoch, incarnation);
        if code != Code::Ok {
            return code;
        }
        if self.region.slice(extent.offset, extent.length).is_none() {
            return Code::OutOfRange;
        }
        let pin = state.pins.entry(extent.offset).or_insert((peer.client, 0));
        pin.1 += 1;
        self.changed.notify_all();
        Code::Ok
    }

    fn unpin(&self, _peer: &Peer, _incarnation: Incarnation, extent: &Extent) -> Code {
        let mut state = self.state.lock();
        let Some(pin) = state.pins.get_mut(&extent.offset) else {
            return Code::OutOfRange;
        };
        pin.1 -= 1;
        if pin.1 == 0 {
            state.pins.remove(&extent.offset);
        }
        self.changed.notify_all();
        Code::Ok
    }

    fn still_hold(&self, peers: &[Peer]) -> Vec<bool> {
        let state = self.state.lock();
        let holds = |peer: &Peer| {
            let mut writes = state.shm_writes.values();
            let mut pins = state.pins.values();
            let mut boards = state.boards.iter();
            writes.any(|(client, _)| *client == peer.client)
                || pins.any(|(client, _)| *client == peer.client)
                || boards.any(|(client, board)| {
                    let mut is_pinned = false;
                    board.look(|_| is_pinned = true);
                    *client == peer.client && is_pinned
                })
        };
        peers.iter().map(holds).collect()
    }

    fn peer_gone(&self, peer: &Peer) {
        let mut state = self.state.lock();
        state
            .shm_writes
            .retain(|_, (client, _)| *client != peer.client);
        state.pins.retain(|_, (client, _)| *client != peer.client);
        state.boards.retain(|(client, _)| *client != peer.client);
        state.gone.push(peer.client);
        self.changed.notify_all();
    }
}
