//! The control channel of links whose bytes bypass the socket (shared memory, RDMA), on the
//! client's side.
//!
//! Requests go out in order, and answers arrive as callbacks. A request never blocks on the socket.
//! The requesting thread sends as much as the socket takes at once, because waking a thread costs
//! more. A sending thread sends the rest. A receiving thread runs the callbacks, so a callback must
//! not block.

use crate::frame::{decode_header, encode_request, failure, receive_meta, status, trace_for};
use crate::link::{ReadOp, SumsOp, TransferError, WriteOp};
use crate::memory::Slice;
use crate::outcomes::{Batch, unreachable};
use crate::shm::fds::receive_with_fd;
use crate::socket::{Gather, Scatter, flush, has_unsent, send_some, shut_down, wait_to_receive};
use crate::split::{pack, source};
use crate::threads;
use crate::wire::Wire;
use kvpool_types::wire::data::{Meta, ReadItem, ReadRequest, Statuses, SumsReply};
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::{HEADER_BYTES, Op};
use kvpool_types::{Checksum, Code, Epoch, Extent, Incarnation};
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The most checksum bytes that one frame asks for. They come back as meta.
const SUMS_BYTES: u64 = 1 << 20;

/// An answer other than a failure. A failure becomes an error.
pub(crate) struct ControlAnswer {
    op: Op,
    meta: Vec<u8>,
    fd: Option<OwnedFd>,
}

type Callback = Box<dyn FnOnce(Result<ControlAnswer, TransferError>) + Send>;

/// The socket. Dropping this closes it after everything in the queue has been sent.
pub(crate) struct Control(Arc<ControlShared>);

struct ControlShared {
    socket: Wire,
    state: Mutex<ControlState>,
    changed: Condvar,
    /// Mirrors [`ControlState::failed`] for readers without the lock.
    has_failed: AtomicBool,
    /// Of the node at the other end.
    features: Features,
}

struct ControlState {
    /// Frames to send, in order. The first may be the unsent rest of a frame. That rest is empty if its bytes
    /// are encrypted already and wait in the TLS session.
    queue: VecDeque<Vec<u8>>,
    /// Whether a thread is sending. Other threads then only queue.
    sending: bool,
    pending: HashMap<u64, Callback>,
    next: u64,
    closing: bool,
    failed: Option<TransferError>,
    /// Runs once when the socket has failed.
    then: Option<Box<dyn FnOnce() + Send>>,
}

impl ControlAnswer {
    /// Decodes the meta of an answer that must be an `op`.
    pub(crate) fn decode<M: Meta>(&self, op: Op) -> Result<M, TransferError> {
        if self.op != op {
            return Err(TransferError {
                code: Code::Malformed,
                message: format!("the node answered with {:?}, not {op:?}", self.op),
            });
        }
        M::decode(&self.meta).map_err(|error| TransferError {
            code: error.code(),
            message: error.to_string(),
        })
    }

    /// Takes the file descriptor that came with the answer.
    pub(crate) fn fd(&mut self) -> Option<OwnedFd> {
        self.fd.take()
    }
}

impl Control {
    /// Takes over a socket after its hello. The threads are named `kvpool-NAME-recv` and `-send`.
    pub(crate) fn start(
        socket: impl Into<Wire>,
        name: &str,
        features: Features,
    ) -> io::Result<Self> {
        let socket = socket.into();
        let shared = Arc::new(ControlShared {
            socket,
            state: Mutex::new(ControlState {
                queue: VecDeque::new(),
                sending: false,
                pending: HashMap::new(),
                next: 1,
                closing: false,
                failed: None,
                then: None,
            }),
            changed: Condvar::new(),
            has_failed: AtomicBool::new(false),
            features,
        });
        let receiver = shared.clone();
        threads::start(&format!("kvpool-{name}-recv"), move || {
            receiver.receive_all();
        })?;
        let sender = shared.clone();
        if let Err(error) =
            threads::start(&format!("kvpool-{name}-send"), move || sender.send_all())
        {
            // The receiving thread would otherwise wait as long as the node keeps the connection.
            shared.fail(&unreachable(&error));
            return Err(error);
        }
        Ok(Self(shared))
    }

    /// Sends a request. `answered` runs with the answer on the receiving thread, or here when the
    /// socket has failed.
    pub(crate) fn request(
        &self,
        op: Op,
        epoch: Epoch,
        meta: &impl Meta,
        answered: impl FnOnce(Result<ControlAnswer, TransferError>) + Send + 'static,
    ) {
        let mut state = self.0.state.lock();
        if let Some(error) = state.failed.clone() {
            drop(state);
            answered(Err(error));
            return;
        }
        let request = state.next;
        match encode_request((op, request, epoch), 0, trace_for(self.0.features), |out| {
            meta.encode(out)
        }) {
            Ok(frame) => {
                state.next += 1;
                state.pending.insert(request, Box::new(answered));
                if state.sending || !state.queue.is_empty() {
                    state.queue.push_back(frame);
                    return;
                }
                state.sending = true;
                drop(state);
                self.0.send_at_once(frame);
            }
            Err(error) => {
                drop(state);
                answered(Err(TransferError {
                    code: error.code(),
                    message: error.to_string(),
                }));
            }
        }
    }

    /// Runs `then` when the socket fails, or now if it has. It runs once, before any callback gets
    /// the error.
    pub(crate) fn when_failed(&self, then: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state.lock();
        if state.failed.is_none() {
            state.then = Some(Box::new(then));
            return;
        }
        drop(state);
        then();
    }

    /// Ends the socket: every waiting callback gets the error.
    pub(crate) fn abort(&self, error: &TransferError) {
        self.0.fail(error);
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.0.has_failed.load(Ordering::Acquire)
    }
}

/// Asks for the chunk checksums of extents. Each extent is one item of the batch.
pub(crate) fn ask_sums(
    control: &Control,
    incarnation: Incarnation,
    epoch: Epoch,
    ops: Vec<SumsOp>,
    batch: &Arc<Batch<Vec<Checksum>>>,
) {
    let ops = ops.into_iter().enumerate();
    let ops = ops
        .map(|(item, op)| (op.extent.length.chunks() * 8, (item, op)))
        .collect();
    pack(ops, SUMS_BYTES, |_, ops| {
        let (indices, items): (Vec<usize>, Vec<ReadItem>) = ops
            .into_iter()
            .map(|(item, op)| (item, ReadItem::whole(op.extent).with(op.right)))
            .unzip();
        let request = ReadRequest { incarnation, items };
        let batch = batch.clone();
        control.request(Op::Sums, epoch, &request, move |answer| {
            let reply = answer.and_then(|answer| answer.decode(Op::SumsReply));
            match reply {
                Ok(SumsReply(sums)) if sums.len() == indices.len() => {
                    for (item, sums) in indices.into_iter().zip(sums) {
                        batch.end(item, sums.map_err(status));
                    }
                }
                reply => {
                    let error = reply.err().unwrap_or_else(|| status(Code::Malformed));
                    for item in indices {
                        batch.end(item, Err(error.clone()));
                    }
                }
            }
        });
    });
}

/// A read whose arguments were checked.
pub(crate) struct Read {
    /// The item's index in its batch.
    pub(crate) item: usize,
    /// The range of the segment to read.
    pub(crate) source: Extent,
    /// The destination.
    pub(crate) into: Vec<Slice>,
}

/// Checks the reads of a batch and returns the valid ones. The others end with an error.
pub(crate) fn judged(control: &Control, batch: &Batch<Checksum>, ops: Vec<ReadOp>) -> Vec<Read> {
    let is_open = control.is_open();
    let mut reads = Vec::with_capacity(ops.len());
    for (item, op) in ops.into_iter().enumerate() {
        match source(&op) {
            Ok(source) if is_open => reads.push(Read {
                item,
                source,
                into: op.into,
            }),
            Ok(_) => batch.end(item, Err(unreachable("the node closed the connection"))),
            Err(error) => batch.end(item, Err(error)),
        }
    }
    reads
}

/// The writes that the node has admitted. The others end with the node's code.
pub(crate) fn admitted(
    answer: Result<ControlAnswer, TransferError>,
    batch: &Batch<Checksum>,
    items: Vec<(usize, WriteOp)>,
) -> Vec<(usize, WriteOp)> {
    let codes = match codes(answer, items.len()) {
        Ok(codes) => codes,
        Err(error) => {
            for (item, _) in items {
                batch.end(item, Err(error.clone()));
            }
            return Vec::new();
        }
    };
    let mut admitted = Vec::with_capacity(items.len());
    for ((item, write), code) in items.into_iter().zip(codes) {
        match code {
            Code::Ok => admitted.push((item, write)),
            code => batch.end(item, Err(status(code))),
        }
    }
    admitted
}

/// Decodes an answer that must hold `count` codes.
pub(crate) fn codes(
    answer: Result<ControlAnswer, TransferError>,
    count: usize,
) -> Result<Vec<Code>, TransferError> {
    let Statuses(codes) = answer?.decode(Op::Statuses)?;
    if codes.len() == count {
        Ok(codes)
    } else {
        Err(TransferError {
            code: Code::Malformed,
            message: "the number of statuses differs from the number of items asked for".to_owned(),
        })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.0.state.lock().closing = true;
        self.0.changed.notify_one();
    }
}

impl ControlShared {
    /// Sends as much of a frame as the socket takes. The sending thread sends the rest, and the frames that
    /// were queued meanwhile. An error is left to that thread, which meets it again. The callbacks of other
    /// requests must not run here.
    fn send_at_once(&self, mut frame: Vec<u8>) {
        let sent = send_some(&self.socket, &frame);
        frame.drain(..sent);
        let mut state = self.state.lock();
        state.sending = false;
        if !frame.is_empty() || has_unsent(&self.socket) {
            state.queue.push_front(frame);
        }
        let left = !state.queue.is_empty() || state.closing;
        drop(state);
        if left {
            self.changed.notify_one();
        }
    }

    fn send_all(&self) {
        while let Some(frame) = self.next_frame() {
            let mut gather = Gather::default();
            gather.push_bytes(&frame);
            let sent = flush(&self.socket).and_then(|()| gather.send_all(&self.socket));
            if let Err(error) = sent {
                self.fail(&unreachable(error));
                return;
            }
            self.state.lock().sending = false;
        }
        // The node closes the socket after its last answer, which ends the receiving thread.
        if let Err(error) = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write) {
            tracing::debug!(%error, "the control socket was closed already");
        }
    }

    /// Waits for the next frame and marks the sending thread as the sender. `None` when the socket
    /// has ended.
    fn next_frame(&self) -> Option<Vec<u8>> {
        let mut state = self.state.lock();
        loop {
            if state.failed.is_some() {
                return None;
            }
            if !state.sending {
                if let Some(frame) = state.queue.pop_front() {
                    state.sending = true;
                    return Some(frame);
                }
                if state.closing {
                    return None;
                }
            }
            self.changed.wait(&mut state);
        }
    }

    fn receive_all(&self) {
        let mut ended = Ok(());
        while ended.is_ok() {
            ended = self.receive_one();
        }
        if let Err(error) = ended {
            self.fail(&error);
        }
    }

    fn receive_one(&self) -> Result<(), TransferError> {
        let mut head = [0; HEADER_BYTES];
        let mut fd = None;
        let mut filled = 0;
        wait_to_receive(&self.socket).map_err(unreachable)?;
        while let Some(room) = head.get_mut(filled..).filter(|room| !room.is_empty()) {
            let received = if self.socket.is_tls() {
                let mut scatter = Scatter::default();
                scatter.push_bytes(room);
                scatter.receive(&self.socket).map(|count| (count, None))
            } else {
                receive_with_fd(self.socket.as_fd(), room)
            };
            let (count, passed) = received.map_err(unreachable)?;
            if count == 0 {
                return Err(unreachable("the node closed the connection"));
            }
            filled += count;
            fd = passed.or(fd);
        }
        let header = decode_header(&head).map_err(unreachable)?;
        let mut meta = Vec::new();
        receive_meta(&self.socket, &header, &mut meta).map_err(unreachable)?;
        if header.request == 0 && header.op == Op::Failure {
            return Err(failure(&meta));
        }
        let callback = self.state.lock().pending.remove(&header.request);
        let callback =
            callback.ok_or_else(|| unreachable("the node answered an unknown request"))?;
        callback(if header.op == Op::Failure {
            Err(failure(&meta))
        } else {
            Ok(ControlAnswer {
                op: header.op,
                meta,
                fd,
            })
        });
        Ok(())
    }

    fn fail(&self, error: &TransferError) {
        shut_down(self.socket.as_fd());
        let (pending, then) = {
            let mut state = self.state.lock();
            state.failed.get_or_insert_with(|| error.clone());
            self.has_failed.store(true, Ordering::Release);
            state.queue.clear();
            (std::mem::take(&mut state.pending), state.then.take())
        };
        self.changed.notify_one();
        if let Some(then) = then {
            then();
        }
        for callback in pending.into_values() {
            callback(Err(error.clone()));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
