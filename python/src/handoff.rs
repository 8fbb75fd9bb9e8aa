//! The base of `kvpool.handoff`: sessions of the hand-off over memory that Python gives by address.
//!
//! ```text
//!  kvpool.handoff.Session ──► HandoffSession ──► kvpool_handoff::session ──► peers
//!        send, receive  ──► HandoffSending, HandoffReceiving: polled or awaited
//! ```

// UNSAFETY: passes on the addresses of a Python caller, as `loan` does. This module first checks that the
// memory is mapped. The caller promises that it stays mapped until the session is closed.
#![allow(unsafe_code, reason = "a Python caller names memory by its address")]

use crate::errors::Fault;
use crate::home::{Home, Resident, end_aside};
use crate::loan::Loan;
use crate::mapped::{Use, is_mapped};
use crate::pool::Int;
use kvpool_handoff::aux::{AuxField, AuxLayout};
use kvpool_handoff::bootstrap::BootstrapServer;
use kvpool_handoff::plan::{Stages, StateRule, StateShape};
use kvpool_handoff::registration::{RankDescription, StateRegion};
use kvpool_handoff::registry::RegistryOptions;
use kvpool_handoff::room::{PollState, RoomId};
use kvpool_handoff::session::{
    DeclineReason, HandoffError, HandoffOptions, HandoffSession as Session, PinLimits, RankMemory,
    Receiving, RequestTimes, Sending, TransferState,
};
use kvpool_transport::peer::Secret;
use kvpool_types::Code;
use parking_lot::Mutex;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest timeout, in seconds.
const MAX_TIMEOUT: f64 = 86_400.0;
/// The time between two checks for Python's signals while a call waits.
const SIGNALS: Duration = Duration::from_millis(50);

/// A state: name, layer, base, pages, rule, and the shape as (outer, parts, part_bytes).
type StateTuple = (
    String,
    Int<u32>,
    Int<usize>,
    Int<u32>,
    String,
    (Int<u64>, Int<u64>, Int<u64>),
);

/// One process's end of its hand-offs.
#[pyclass(frozen, module = "kvpool._native")]
pub(crate) struct HandoffSession {
    open: Mutex<Option<Open>>,
    /// The result of the session's end. The lock is held while the session ends.
    ended: Mutex<Option<bool>>,
    home: Home,
    address: String,
}

struct Open {
    // Dropped first, because peers touch the memory as long as the session lives.
    session: Arc<Session>,
    loan: Loan,
    _resident: Resident,
}

/// Prefill's end of one request.
#[pyclass(frozen, module = "kvpool._native")]
pub(crate) struct HandoffSending(Option<Sending>, Home);

/// Decode's end of one request.
#[pyclass(frozen, module = "kvpool._native")]
pub(crate) struct HandoffReceiving(Option<Receiving>, Home);

fn deadline(timeout: f64) -> PyResult<Instant> {
    if timeout.is_nan() || timeout < 0.0 {
        return Err(Fault::invalid(format!("{timeout} s is not a valid timeout")).into());
    }
    Ok(Instant::now() + Duration::from_secs_f64(timeout.min(MAX_TIMEOUT)))
}

/// The times of a request: its deadline, and how long the other end may take to open its room.
fn times(timeout: f64, patience: Option<f64>) -> PyResult<RequestTimes> {
    let now = Instant::now();
    let patience = patience.map(deadline).transpose()?;
    Ok(RequestTimes {
        deadline: deadline(timeout)?,
        patience: patience.map(|until| until.saturating_duration_since(now)),
    })
}

fn fault(error: &HandoffError) -> PyErr {
    match error {
        HandoffError::Closed => Fault::closed("the session is closed").into(),
        HandoffError::Repeated(_) => Fault::new(Code::InProgress, error.to_string()).into(),
        _ => Fault::invalid(error.to_string()).into(),
    }
}

fn invalid(error: impl std::fmt::Display) -> PyErr {
    Fault::invalid(error.to_string()).into()
}

/// The numbers of a list.
fn numbers(list: Vec<Int<u32>>) -> Vec<u32> {
    list.into_iter().map(|number| number.0).collect()
}

/// Refuses an address without a host or a port. No peer is ever found there.
fn check_address(address: &str) -> PyResult<()> {
    let is_host = |host: &str| match host.strip_prefix('[') {
        Some(rest) => rest.ends_with(']'),
        None => !host.is_empty() && !host.contains(':'),
    };
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    match address.rsplit_once(':') {
        Some((host, port)) if is_host(host) && is_port(port) => Ok(()),
        _ => Err(invalid(format!("{address:?} is no address host:port"))),
    }
}

fn rule(name: &str) -> PyResult<StateRule> {
    match name {
        "slice" => Ok(StateRule::Slice),
        "copy" => Ok(StateRule::Copy),
        "one_source" => Ok(StateRule::OneSource),
        other => Err(invalid(format!(
            "the rule of a state is slice, copy or one_source, not {other:?}"
        ))),
    }
}

#[pymethods]
impl HandoffSession {
    #[new]
    #[allow(
        clippy::too_many_arguments,
        reason = "kvpool.handoff.Session names them"
    )]
    fn new(
        py: Python<'_>,
        states: Vec<StateTuple>,
        page_tokens: Int<u32>,
        listen: (String, Int<u16>),
        advertise: Option<String>,
        name: String,
        secret: &str,
        tensor: (Int<u32>, Int<u32>),
        pipeline: (Int<u32>, Vec<Int<u32>>),
        hidden_bytes: Int<u32>,
        failure_probability: f64,
        pins: (Option<Int<u64>>, Int<u8>, f64),
    ) -> PyResult<Self> {
        let (pages, Int(reserve_percent), back_off) = pins;
        let pages = pages.map(|pages| pages.0);
        let (Int(page_tokens), Int(hidden_bytes)) = (page_tokens, hidden_bytes);
        let (host, Int(port)) = listen;
        let tensor = (tensor.0.0, tensor.1.0);
        if reserve_percent > 100 || !(0.0..=MAX_TIMEOUT).contains(&back_off) {
            return Err(invalid(format!(
                "a reserve of {reserve_percent} % or a back-off of {back_off} s is out of range"
            )));
        }
        if !(0.0..=1.0).contains(&failure_probability) {
            return Err(invalid(format!("{failure_probability} is no probability")));
        }
        let resident = Resident::new()?;
        let (stage, layers) = (pipeline.0.0, numbers(pipeline.1));
        let stages = Stages::new(&layers).map_err(invalid)?;
        if stages.stage(stage).is_none() || tensor.0 >= tensor.1 {
            return Err(invalid(format!(
                "rank {} of {} in stage {stage} of {} does not exist",
                tensor.0,
                tensor.1,
                layers.len()
            )));
        }
        let loan = Loan::new();
        let (mut regions, mut memories) = (Vec::new(), Vec::new());
        for (name, Int(layer), Int(base), Int(pages), kind, shape) in states {
            let (Int(outer), Int(parts), Int(part_bytes)) = shape;
            let shape = StateShape::new(rule(&kind)?, outer, parts, part_bytes).map_err(invalid)?;
            let page = shape.page_bytes(tensor.1).map_err(invalid)?;
            let bytes = page.checked_mul(u64::from(pages));
            let bytes = bytes.ok_or_else(|| invalid("a state exceeds the address space"))?;
            let start = u64::try_from(base)?;
            let is_there = is_mapped(start, bytes, Use::ReadWrite)?;
            // SAFETY: `is_mapped` has just found the memory mapped for reading and writing. The caller keeps it
            // mapped until `close` has returned.
            let memory = unsafe { loan.lend(base, bytes) }.filter(|_| is_there && bytes > 0);
            memories.push(memory.ok_or_else(|| {
                invalid(format!(
                    "{bytes} bytes at {base:#x} are not memory of this process that can be written"
                ))
            })?);
            regions.push(StateRegion {
                name,
                layer,
                shape,
                base: start,
                pages,
            });
        }
        let description = RankDescription {
            address: String::new(),
            tensor,
            pipeline: (stage, stages),
            page_tokens,
            hidden_bytes,
            states: regions,
        };
        let memory = RankMemory::new(description, memories).map_err(invalid)?;
        let options = HandoffOptions {
            name,
            secret: Secret::new(secret),
            address: advertise,
            failure_probability,
            pins: PinLimits {
                pages,
                reserve_percent,
                back_off: Duration::from_secs_f64(back_off),
            },
            ..HandoffOptions::default()
        };
        let session = py.detach(|| {
            let listener = TcpListener::bind((host.as_str(), port))?;
            Session::start(listener, memory, options)
        });
        let session = session.map_err(|error| PyOSError::new_err(error.to_string()))?;
        let address = session.address().to_owned();
        let open = Open {
            session: Arc::new(session),
            loan,
            _resident: resident,
        };
        Ok(Self {
            open: Mutex::new(Some(open)),
            ended: Mutex::new(None),
            home: Home::here(),
            address,
        })
    }

    /// The address that the session advertises to peers: "host:port".
    #[getter]
    fn address(&self) -> String {
        self.address.clone()
    }

    /// The number of pages of requests that are being sent.
    fn pinned(&self) -> PyResult<u64> {
        Ok(self.session()?.pinned())
    }

    /// The number of offers that wait until other offers free their pages.
    fn waiting(&self) -> PyResult<u64> {
        Ok(self.session()?.waiting_offers())
    }

    /// Declines a request.
    fn decline(&self, room: Int<u64>, senders: Vec<String>, no_pages: bool) -> PyResult<()> {
        let reason = match no_pages {
            true => DeclineReason::NoPages,
            false => DeclineReason::NotWanted,
        };
        let declined = self.session()?.decline(RoomId(room.0), &senders, reason);
        declined.map_err(|error| fault(&error))
    }

    fn send(
        &self,
        room: Int<u64>,
        pages: Vec<Int<u32>>,
        decode_tp: Int<u32>,
        timeout: f64,
        patience: Option<f64>,
    ) -> PyResult<HandoffSending> {
        let (times, pages) = (times(timeout, patience)?, numbers(pages));
        let session = self.session()?;
        self.sending(session.send(RoomId(room.0), pages, decode_tp.0, times))
    }

    fn offer(
        &self,
        room: Int<u64>,
        pages: Vec<Int<u32>>,
        decode_tp: Int<u32>,
        timeout: f64,
    ) -> PyResult<HandoffSending> {
        let (until, pages) = (deadline(timeout)?, numbers(pages));
        let session = self.session()?;
        self.sending(session.offer(RoomId(room.0), pages, decode_tp.0, until))
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "kvpool.handoff.Session.receive names them"
    )]
    fn receive(
        &self,
        room: Int<u64>,
        pages: Vec<Int<u32>>,
        held: Int<u32>,
        senders: Vec<String>,
        prefill_tp: Int<u32>,
        prefill_layers: Vec<Int<u32>>,
        aux: bool,
        timeout: f64,
        patience: Option<f64>,
    ) -> PyResult<HandoffReceiving> {
        let session = self.session()?;
        senders.iter().try_for_each(|it| check_address(it))?;
        let stages = Stages::new(&numbers(prefill_layers)).map_err(invalid)?;
        let of_prefill = (prefill_tp.0, &stages);
        let times = times(timeout, patience)?;
        let receiving = session.receive(
            RoomId(room.0),
            (held.0, numbers(pages)),
            &senders,
            of_prefill,
            aux,
            times,
        );
        let receiving = receiving.map_err(|error| fault(&error))?;
        Ok(HandoffReceiving(Some(receiving), self.home))
    }

    /// Ends all transfers. Returns false when a peer may still touch the memory: do not free it then.
    fn close(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.end())
    }
}

impl HandoffSession {
    fn sending(&self, opened: Result<Sending, HandoffError>) -> PyResult<HandoffSending> {
        let sending = opened.map_err(|error| fault(&error))?;
        Ok(HandoffSending(Some(sending), self.home))
    }

    fn session(&self) -> PyResult<Arc<Session>> {
        self.home.check()?;
        let open = self.open.lock();
        let session = open.as_ref().map(|open| Arc::clone(&open.session));
        session.ok_or_else(|| Fault::closed("the session is closed").into())
    }

    /// Ends the session. A second caller waits for the first and gets the same result. Call it without the
    /// interpreter's lock.
    fn end(&self) -> PyResult<bool> {
        self.home.check()?;
        let mut ended = self.ended.lock();
        if let Some(ended) = *ended {
            return Ok(ended);
        }
        let open = self.open.lock().take();
        let is_over = open.is_none_or(|Open { session, loan, .. }| {
            let is_over = session.close();
            drop(session);
            is_over && loan.returned().is_ok()
        });
        *ended = Some(is_over);
        Ok(is_over)
    }
}

impl Drop for HandoffSession {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // The session's threads belong to the parent, so ending it here would wait for ever. A missing thread
            // may hold the lock.
            std::mem::forget(self.open.get_mut().take());
            return;
        }
        // A caller that drops the session has given up its memory.
        end_aside(|| drop(self.end()));
    }
}

impl HandoffSending {
    /// The request. Fails in a child made by fork, where a thread of the parent may hold the request's locks
    /// for ever.
    fn here(&self) -> PyResult<&Sending> {
        self.1.check()?;
        let sending = self.0.as_ref();
        sending.ok_or_else(|| Fault::closed("the request is over").into())
    }
}

impl HandoffReceiving {
    /// As [`HandoffSending::here`].
    fn here(&self) -> PyResult<&Receiving> {
        self.1.check()?;
        let receiving = self.0.as_ref();
        receiving.ok_or_else(|| Fault::closed("the request is over").into())
    }
}

impl Drop for HandoffSending {
    fn drop(&mut self) {
        if !self.1.is_here() {
            std::mem::forget(self.0.take());
        }
    }
}

impl Drop for HandoffReceiving {
    fn drop(&mut self) {
        if !self.1.is_here() {
            std::mem::forget(self.0.take());
        }
    }
}

/// Waits in steps. Python's signal handlers run between the steps.
fn wait(
    py: Python<'_>,
    timeout: f64,
    step: impl Fn(Instant) -> TransferState + Sync,
) -> PyResult<u8> {
    let until = deadline(timeout)?;
    loop {
        let next = until.min(Instant::now() + SIGNALS);
        let state = py.detach(|| step(next));
        let is_over = matches!(state.poll, PollState::Failed | PollState::Success);
        if (is_over && state.is_released) || Instant::now() >= until {
            return Ok(state.poll.number());
        }
        py.check_signals()?;
    }
}

/// The poll state, the reason of a failure, and whether the pages are free.
fn told(state: &TransferState) -> (u8, Option<&'static str>, bool) {
    let failure = state.failure.map(Code::label);
    (state.poll.number(), failure, state.is_released)
}

#[pymethods]
impl HandoffSending {
    fn state(&self) -> PyResult<(u8, Option<&'static str>, bool)> {
        Ok(told(&self.here()?.state()))
    }

    fn produced(
        &self,
        pages: (Int<u32>, Int<u32>),
        layers: Option<(Int<u32>, Int<u32>)>,
    ) -> PyResult<()> {
        let layers = layers.map_or(self.here()?.layers(), |(first, end)| first.0..end.0);
        let produced = self.here()?.produced(pages.0.0..pages.1.0, layers);
        produced.map_err(|error| fault(&error))
    }

    fn finish(&self, aux: Vec<u8>) -> PyResult<()> {
        self.here()?.finish(aux).map_err(|error| fault(&error))
    }

    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<u8> {
        let request = self.here()?;
        wait(py, timeout, |until| request.wait(until))
    }

    fn abort(&self) -> PyResult<()> {
        self.here()?.abort();
        Ok(())
    }
}

#[pymethods]
impl HandoffReceiving {
    fn state(&self) -> PyResult<(u8, Option<&'static str>, bool)> {
        Ok(told(&self.here()?.state()))
    }

    /// The slot of metadata. `None` until the transfer has succeeded.
    fn aux<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let aux = self.here()?.state().aux;
        Ok(aux.map(|aux| PyBytes::new(py, &aux)))
    }

    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<u8> {
        let request = self.here()?;
        wait(py, timeout, |until| request.wait(until))
    }

    fn abort(&self) -> PyResult<()> {
        self.here()?.abort();
        Ok(())
    }
}

/// A bootstrap server, with a runtime of its own.
#[pyclass(frozen, module = "kvpool._native")]
pub(crate) struct HandoffBootstrap {
    open: Mutex<Option<(BootstrapServer, tokio::runtime::Runtime)>>,
    home: Home,
    address: String,
    _resident: Resident,
}

#[pymethods]
impl HandoffBootstrap {
    #[new]
    fn new(py: Python<'_>, host: &str, port: Int<u16>) -> PyResult<Self> {
        let resident = Resident::new()?;
        let started = py.detach(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .thread_name("kvpool-bootstrap")
                .enable_all()
                .build()?;
            let server = runtime.block_on(async {
                let listener = tokio::net::TcpListener::bind((host, port.0)).await?;
                BootstrapServer::start(listener, RegistryOptions::default())
            })?;
            std::io::Result::Ok((server, runtime))
        });
        let (server, runtime) = started.map_err(|error| PyOSError::new_err(error.to_string()))?;
        let address = server.address().to_string();
        Ok(Self {
            open: Mutex::new(Some((server, runtime))),
            home: Home::here(),
            address,
            _resident: resident,
        })
    }

    /// The address of the server: "host:port".
    #[getter]
    fn address(&self) -> String {
        self.address.clone()
    }

    /// Ends the server.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check()?;
        let open = self.open.lock().take();
        py.detach(|| {
            if let Some((server, runtime)) = open {
                // The server has logged an earlier error.
                drop(runtime.block_on(server.stop()));
                runtime.shutdown_timeout(Duration::from_secs(1));
            }
        });
        Ok(())
    }
}

impl Drop for HandoffBootstrap {
    fn drop(&mut self) {
        // In a child made by fork a missing thread may hold the lock.
        let open = self.open.get_mut().take();
        match open {
            Some(open) if !self.home.is_here() => std::mem::forget(open),
            Some((server, runtime)) => {
                drop(server);
                runtime.shutdown_background();
            }
            None => {}
        }
    }
}

/// The byte ranges of the fields in a slot of metadata, as (name, begin, end), and the length of the slot.
#[pyfunction]
pub(crate) fn handoff_aux_layout(hidden_bytes: Int<u32>) -> (Vec<(String, u64, u64)>, u64) {
    let layout = AuxLayout::new(hidden_bytes.0);
    let place = |field: &AuxField| {
        let range = layout.range(*field);
        (field.name().to_owned(), range.start, range.end)
    };
    (
        AuxField::ALL.iter().map(place).collect(),
        layout.slot_bytes(),
    )
}
