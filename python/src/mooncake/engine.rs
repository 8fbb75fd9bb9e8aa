//! The base of `mooncake.engine`: transfers between registered memory of this process and of its peers.
//!
//! ```text
//!  mooncake.engine.TransferEngine ──► PeerEngine ──► transport::peer::Endpoint
//!                                        ├─ Memory   the registered ranges, by address
//!                                        └─ Batches  the transfers in the background
//! ```

// UNSAFETY: passes on the addresses of a Python caller, as `loan` and `memory` do. This module first checks
// that the memory is mapped. The caller promises that it stays mapped while it is registered or lent.
#![allow(unsafe_code, reason = "a Python caller names memory by its address")]

mod batches;

use crate::home::{Home, Resident, drop_aside, end_aside};
use crate::loan::Loan;
use crate::mapped::{Use, is_mapped};
use crate::memory::Memory;
use batches::{Batches, Status};
use kvpool_transport::peer::{Direction, Endpoint, EndpointOptions, Move, Route, Secret};
use kvpool_transport::rdma::{RdmaOptions, RegisteredBuffer};
use kvpool_transport::{Slice, TransferError, TransportKind};
use kvpool_types::{Code, Offset};
use parking_lot::Mutex;
use pyo3::exceptions::{
    PyConnectionError, PyOSError, PyPermissionError, PyRuntimeError, PyTimeoutError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::net::TcpListener;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a peer's transfer may make no progress. Also how long `unregister` waits for a transfer before it
/// aborts the transfer.
const STALL: Duration = Duration::from_secs(10);
/// How long closing waits for transfers in progress.
const END_GRACE: Duration = Duration::from_secs(2);
/// The longest timeout, in seconds. A longer timeout is meant as "no limit", and counts as this one.
const MAX_TIMEOUT: f64 = 86_400.0;

/// One session: memory of this process that peers may read and write, and transfers to and from peers.
///
/// Addresses and lengths are in bytes, timeouts in seconds. A transfer raises:
///
/// - TimeoutError at its deadline;
/// - ConnectionError when the peer cannot be reached or closes the connection;
/// - PermissionError without the peer's secret;
/// - ValueError for memory that is not registered at the peer or is not mapped here.
#[pyclass(frozen, module = "kvpool._native")]
pub(crate) struct PeerEngine {
    session: Mutex<Option<Arc<Session>>>,
    home: Home,
}

struct Session {
    // Dropped first, because peers touch the memory as long as the endpoint lives.
    endpoint: Endpoint,
    memory: Memory,
    batches: Batches,
    _resident: Resident,
}

/// The hold of one call on a session.
///
/// A call may outlast the wait of `close`. Then it is the last holder and ends the session, which waits for the
/// session's threads. So this runs without the interpreter's lock.
struct SessionHold(Option<Arc<Session>>);

impl Deref for SessionHold {
    type Target = Arc<Session>;

    fn deref(&self) -> &Arc<Session> {
        self.0
            .as_ref()
            .expect("invariant: the session is held until the drop")
    }
}

impl Drop for SessionHold {
    fn drop(&mut self) {
        if let Some(last) = self.0.take().and_then(Arc::into_inner) {
            drop_aside(last);
        }
    }
}

/// One transfer of a caller.
struct Asked {
    target: String,
    direction: Direction,
    moves: Vec<Move>,
    loan: Loan,
    message: Option<Vec<u8>>,
    deadline: Instant,
}

#[pymethods]
impl PeerEngine {
    /// Serves peers at `host` and `port`; 0 means any free port. `name` is for the peers' logs. Peers need the
    /// same `secret`. With an empty secret every process that reaches the port may access registered memory.
    /// Bytes go over the named RDMA devices, or over all devices for an empty list. With None, or without a
    /// device, bytes go over TCP. With `reads_directly`, this process and peers on the same host copy large
    /// reads from each other's memory instead, where the kernel permits it.
    #[new]
    #[pyo3(signature = (host, port, name, secret, rdma_devices=None, reads_directly=true))]
    fn new(
        py: Python<'_>,
        host: &str,
        port: u16,
        name: String,
        secret: &str,
        rdma_devices: Option<Vec<String>>,
        reads_directly: bool,
    ) -> PyResult<Self> {
        let resident =
            Resident::new().map_err(|fault| PyRuntimeError::new_err(fault.message().to_owned()))?;
        let endpoint = py.detach(|| {
            let options = EndpointOptions {
                name,
                secret: Secret::new(secret),
                stall: STALL,
                rdma: rdma_devices.map(|devices| RdmaOptions {
                    devices,
                    ..RdmaOptions::default()
                }),
                reads_directly,
                letters: None,
            };
            Endpoint::start(TcpListener::bind((host, port))?, options)
        })?;
        let session = Session {
            endpoint,
            memory: Memory::default(),
            batches: Batches::default(),
            _resident: resident,
        };
        Ok(Self {
            session: Mutex::new(Some(Arc::new(session))),
            home: Home::here(),
        })
    }

    /// The port that peers connect to.
    fn port(&self) -> PyResult<u16> {
        Ok(self.session()?.endpoint.local_addr().port())
    }

    /// The names of the RDMA ports in use, and the reason if there are none.
    fn ports(&self) -> PyResult<(Vec<String>, Option<String>)> {
        let session = self.session()?;
        Ok(match session.endpoint.ports() {
            Ok(ports) => (ports.to_vec(), None),
            Err(why) => (Vec::new(), Some(why.to_owned())),
        })
    }

    /// The transport to the peer at `target`, "rdma" or "tcp", the reason if it is not "rdma", and whether large
    /// reads are copied from the peer's process.
    fn route(&self, py: Python<'_>, target: &str, timeout: f64) -> PyResult<Told> {
        let deadline = Instant::now() + seconds(timeout)?;
        let session = self.session()?;
        let route = py.detach(|| session.endpoint.route(target, deadline));
        Ok(told(route.map_err(|error| raised(&error))?))
    }

    /// The transport of each peer whose transport was chosen or changed since the last call.
    fn news(&self) -> PyResult<Vec<(String, Told)>> {
        let news = self.session()?.endpoint.route_changes().into_iter();
        Ok(news.map(|(target, route)| (target, told(route))).collect())
    }

    /// Lets peers read and write `length` bytes at `address` until `unregister`. Raises ValueError for a range
    /// that is not memory of this process, or that overlaps a registered range.
    fn register(&self, py: Python<'_>, address: usize, length: u64) -> PyResult<()> {
        let session = self.session()?;
        py.detach(|| session.register(address, length))
    }

    /// Ends the registration of the range at `address` when no transfer uses it. Returns False without such
    /// a registration. Raises RuntimeError if a transfer still uses it after the timeout.
    fn unregister(&self, py: Python<'_>, address: usize) -> PyResult<bool> {
        let session = self.session()?;
        py.detach(|| {
            let start = u64::try_from(address)?;
            let withdrawn = session.endpoint.withdraw(start, STALL).map_err(fault)?;
            let unregistered = session.memory.unregister(address).map_err(fault)?;
            Ok(withdrawn || unregistered)
        })
    }

    /// Moves bytes between this process and the peer at `target`, "host:port". Then sends `message` to the
    /// peer, if given.
    #[pyo3(signature = (target, write, addresses, remotes, lengths, timeout, message=None))]
    #[allow(clippy::too_many_arguments, reason = "as the caller gives them")]
    fn transfer(
        &self,
        py: Python<'_>,
        target: String,
        write: bool,
        addresses: Vec<usize>,
        remotes: Vec<u64>,
        lengths: Vec<u64>,
        timeout: f64,
        message: Option<Vec<u8>>,
    ) -> PyResult<()> {
        let deadline = Instant::now() + seconds(timeout)?;
        let session = self.session()?;
        py.detach(|| {
            let (moves, loan) = session.lend(write, &addresses, &remotes, &lengths)?;
            let asked = Asked {
                target,
                direction: direction(write),
                moves,
                loan,
                message,
                deadline,
            };
            session.carry_out(asked).map_err(|error| raised(&error))
        })
    }

    /// As `transfer`, but in the background. Returns the transfer's number, which is never 0. Keep the memory
    /// until `status` reports the end of the transfer.
    #[pyo3(signature = (target, write, addresses, remotes, lengths, timeout, message=None))]
    #[allow(clippy::too_many_arguments, reason = "as the caller gives them")]
    fn submit(
        &self,
        py: Python<'_>,
        target: String,
        write: bool,
        addresses: Vec<usize>,
        remotes: Vec<u64>,
        lengths: Vec<u64>,
        timeout: f64,
        message: Option<Vec<u8>>,
    ) -> PyResult<u64> {
        let deadline = Instant::now() + seconds(timeout)?;
        let session = self.session()?;
        py.detach(|| {
            let (moves, loan) = session.lend(write, &addresses, &remotes, &lengths)?;
            let asked = Asked {
                target,
                direction: direction(write),
                moves,
                loan,
                message,
                deadline,
            };
            let number = session.batches.begin();
            let background = Arc::clone(&session);
            let target = asked.target.clone();
            let begun = session.endpoint.in_background(&target, move || {
                let outcome = background.carry_out(asked);
                background.batches.end(number, outcome);
            });
            if let Err(error) = begun {
                session.batches.forget(number);
                return Err(error.into());
            }
            Ok(number)
        })
    }

    /// The state of a submitted transfer: 1 done, 0 pending, -1 failed, -2 timed out. None for an unknown
    /// number, and for a transfer that ended thousands of transfers ago.
    fn status(&self, number: u64) -> PyResult<Option<i32>> {
        let status = self.session()?.batches.status(number);
        Ok(status.as_ref().map(Status::number))
    }

    /// Waits until a submitted transfer has ended, for at most the timeout. Returns its state, as `status`
    /// does.
    fn wait(&self, py: Python<'_>, number: u64, timeout: f64) -> PyResult<Option<i32>> {
        let deadline = Instant::now() + seconds(timeout)?;
        let session = self.session()?;
        let status = py.detach(|| session.batches.wait(number, deadline));
        Ok(status.as_ref().map(Status::number))
    }

    /// The reason of a failed transfer; None for any other transfer.
    fn failure(&self, number: u64) -> PyResult<Option<String>> {
        Ok(match self.session()?.batches.status(number) {
            Some(Status::Ended(Err(error))) => Some(error.to_string()),
            _ => None,
        })
    }

    /// Returns the messages from peers since the last call, oldest first.
    fn messages<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let messages = self.session()?.endpoint.messages().into_iter();
        Ok(messages.map(|message| PyBytes::new(py, &message)).collect())
    }

    /// The address of the memory that the peer registered first; None if it has registered none.
    fn first_registered(
        &self,
        py: Python<'_>,
        target: &str,
        timeout: f64,
    ) -> PyResult<Option<u64>> {
        let deadline = Instant::now() + seconds(timeout)?;
        let session = self.session()?;
        py.detach(|| session.endpoint.first_exposed(target, deadline))
            .map_err(|error| raised(&error))
    }

    /// Copies bytes to an address in this process. Raises ValueError if the range is not memory of this
    /// process.
    fn write_bytes(&self, py: Python<'_>, address: usize, data: &[u8]) -> PyResult<()> {
        let session = self.session()?;
        py.detach(|| {
            let loan = Loan::new();
            let length = u64::try_from(data.len())?;
            let memory = session.lend_one(&loan, address, length, Use::ReadWrite)?;
            memory.write_at(Offset(0), data);
            drop(memory);
            loan.returned().map_err(fault)
        })
    }

    /// Copies bytes from an address in this process. Raises ValueError if the range is not memory of this
    /// process.
    fn read_bytes<'py>(
        &self,
        py: Python<'py>,
        address: usize,
        length: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let session = self.session()?;
        let bytes = py.detach(|| {
            let loan = Loan::new();
            let memory = session.lend_one(&loan, address, length, Use::Read)?;
            let bytes = memory.to_vec();
            drop(memory);
            loan.returned().map_err(fault)?;
            PyResult::Ok(bytes)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Ends the session: no peer writes to memory any more, and other calls raise RuntimeError. Returns False
    /// if a transfer still uses memory; do not free it then. A second call has no effect.
    fn close(&self, py: Python<'_>) -> bool {
        py.detach(|| self.end())
    }
}

impl PeerEngine {
    /// The session for one call. Fails if it is closed or belongs to another process.
    fn session(&self) -> PyResult<SessionHold> {
        if !self.home.is_here() {
            return Err(PyRuntimeError::new_err(
                "the engine belongs to the process that this one was forked from",
            ));
        }
        let session = self.session.lock().clone();
        let session = session.ok_or_else(|| PyRuntimeError::new_err("the engine is closed"))?;
        Ok(SessionHold(Some(session)))
    }

    /// Ends the session. Returns false when a transfer still uses memory.
    fn end(&self) -> bool {
        if !self.home.is_here() {
            // The session's threads belong to the parent, so ending it here would wait for ever. A missing thread
            // may hold the lock.
            return true;
        }
        let Some(session) = self.session.lock().take() else {
            return true;
        };
        let withdrawn = session.endpoint.withdraw_all();
        // Any other owner of the session is in the middle of a transfer, in a call or in the background.
        let until = Instant::now() + END_GRACE;
        while Arc::strong_count(&session) > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        withdrawn && Arc::strong_count(&session) == 1
    }
}

impl Drop for PeerEngine {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // As in `end`.
            std::mem::forget(self.session.get_mut().take());
            return;
        }
        end_aside(|| {
            self.end();
        });
    }
}

impl Session {
    fn register(&self, address: usize, length: u64) -> PyResult<()> {
        let start = u64::try_from(address)?;
        if !is_mapped(start, length, Use::ReadWrite)? {
            return Err(no_memory(address, length));
        }
        let expose = |memory: &Slice| {
            let exposed = self.endpoint.expose(memory.clone());
            // The endpoint itself registers the range with its RDMA ports: for peers now, for its own transfers
            // at their first use.
            exposed
                .map(|()| RegisteredBuffer::default())
                .map_err(std::io::Error::other)
        };
        // SAFETY: `is_mapped` has just found the range mapped for reading and writing. The caller keeps it
        // mapped until it is unregistered.
        unsafe { self.memory.register(address, length, expose) }
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// The moves of a transfer, and the loan that tells when their memory is free again.
    fn lend(
        &self,
        write: bool,
        addresses: &[usize],
        remotes: &[u64],
        lengths: &[u64],
    ) -> PyResult<(Vec<Move>, Loan)> {
        if addresses.len() != remotes.len() || addresses.len() != lengths.len() {
            return Err(PyValueError::new_err(format!(
                "{} addresses, {} peer addresses and {} lengths were given",
                addresses.len(),
                remotes.len(),
                lengths.len()
            )));
        }
        let how = if write { Use::Read } else { Use::ReadWrite };
        let loan = Loan::new();
        let ranges = addresses.iter().zip(remotes).zip(lengths);
        let moves = ranges
            .map(|((address, remote), length)| {
                Ok(Move {
                    local: self.lend_one(&loan, *address, *length, how)?,
                    remote: *remote,
                })
            })
            .collect::<PyResult<Vec<_>>>()?;
        Ok((moves, loan))
    }

    fn lend_one(&self, loan: &Loan, address: usize, length: u64, how: Use) -> PyResult<Slice> {
        let is_registered = self.memory.part(address, length).is_some();
        if !is_registered && !is_mapped(u64::try_from(address)?, length, how)? {
            return Err(no_memory(address, length));
        }
        // SAFETY: the range is mapped for this access: `is_mapped` or the registration has checked it. The
        // caller keeps it mapped until the call or the submitted transfer has ended.
        unsafe { self.memory.lend(loan, address, length, None) }
            .map_err(|_| no_memory(address, length))
    }

    fn carry_out(&self, asked: Asked) -> Result<(), TransferError> {
        let Asked {
            target,
            direction,
            moves,
            loan,
            message,
            deadline,
        } = asked;
        let outcome = self.endpoint.transfer(&target, direction, &moves, deadline);
        drop(moves);
        // Callers use the memory again after any end of a transfer.
        loan.returned_at_last();
        outcome?;
        match message {
            Some(message) => self.endpoint.tell(&target, &message, deadline),
            None => Ok(()),
        }
    }
}

/// The transport to a peer, the reason if it is not RDMA, and whether large reads are copied from its process.
type Told = (&'static str, Option<String>, bool);

fn told(route: Route) -> Told {
    let kind = match route.kind {
        TransportKind::Rdma => "rdma",
        TransportKind::Tcp => "tcp",
        TransportKind::Shm => "shm",
    };
    (
        kind,
        route.why.map(|why| why.to_string()),
        route.reads_directly,
    )
}

fn direction(write: bool) -> Direction {
    if write {
        Direction::Write
    } else {
        Direction::Read
    }
}

fn seconds(timeout: f64) -> PyResult<Duration> {
    if timeout.is_nan() || timeout < 0.0 {
        return Err(PyValueError::new_err(format!(
            "{timeout} s is not a valid timeout"
        )));
    }
    Ok(Duration::from_secs_f64(timeout.min(MAX_TIMEOUT)))
}

fn no_memory(address: usize, length: u64) -> PyErr {
    PyValueError::new_err(format!(
        "{length} bytes at {address:#x} are not memory of this process with the needed access"
    ))
}

fn fault(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

fn raised(error: &TransferError) -> PyErr {
    let message = error.to_string();
    match error.code {
        Code::DeadlineExceeded => PyTimeoutError::new_err(message),
        Code::Unreachable | Code::WrongIncarnation | Code::Draining => {
            PyConnectionError::new_err(message)
        }
        Code::GrantRefused => PyPermissionError::new_err(message),
        Code::InvalidArgument | Code::OutOfRange | Code::TooLarge => PyValueError::new_err(message),
        _ => PyOSError::new_err(message),
    }
}
