//! The setup of a store, its segments and registered memory, and its end.

use super::args::Number;
use super::pool::Pool;
use super::segments::{SegmentError, Wanted};
use super::{LAST_ERROR, ObjectStore, aside, codes, lent};
use crate::home::Resident;
use kvpool_client::blocking::Client;
use kvpool_client::{Leasing, Namespace, Options, RdmaOptions, Remove, Timeouts};
use kvpool_types::{Code, Key};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A key for probing the master. No caller uses it.
const HEALTH_KEY: &str = "kvpool/health";

/// Timeouts in milliseconds: of connecting, a put, a get, and any other call.
type TimeoutMillis = (u64, u64, u64, u64);

#[pymethods]
impl ObjectStore {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Connects to the pool. Returns a code and, unless it is 0, the reason.
    fn connect(
        &self,
        py: Python<'_>,
        masters: Vec<String>,
        namespace: String,
        rdma_devices: Vec<String>,
        patience: TimeoutMillis,
    ) -> PyResult<(i64, String)> {
        if self.pool()?.is_some() {
            return Ok((codes::PARAMETERS, "the store is already set up".into()));
        }
        let resident =
            Resident::new().map_err(|fault| PyRuntimeError::new_err(fault.message().to_owned()))?;
        let namespace = Namespace {
            name: namespace,
            ..Namespace::default()
        };
        if let Err(error) = namespace.validate() {
            return Ok((codes::PARAMETERS, error.to_string()));
        }
        let (connect, put, get, control) = patience;
        let options = Options {
            masters,
            namespace,
            rdma: RdmaOptions {
                devices: rdma_devices,
                ..RdmaOptions::default()
            },
            timeouts: Timeouts {
                connect: Duration::from_millis(connect),
                put: Duration::from_millis(put),
                get: Duration::from_millis(get),
                control: Duration::from_millis(control),
            },
            tls: kvpool_client::ClientFiles::from_environment(),
            ..Options::default()
        };
        match aside(py, || {
            Client::connect_with(options, crate::interrupts::cancel_check())
        }) {
            Ok(client) => {
                let pool = Arc::new(Pool::new(client, resident));
                // Two threads may set the store up. The earlier pool ends once the lock of the store is free.
                let earlier = self.pool.write().replace(pool);
                drop(earlier);
                self.process.store(std::process::id(), Ordering::Release);
                Ok((codes::OK, String::new()))
            }
            Err(error) => Ok((codes::of(error.code(), codes::RPC), error.to_string())),
        }
    }

    /// Contributes a segment of `size` bytes as the node `name`. Blocks that leave the segment go to its media.
    /// Returns a code, the reason unless it is 0, and the files of the media.
    #[allow(clippy::too_many_arguments, reason = "one a setting, passed by name")]
    fn add_segment(
        &self,
        py: Python<'_>,
        masters: Vec<String>,
        size: Number,
        ssd: Vec<String>,
        name: String,
        listen: String,
        advertise: String,
        rdma_devices: Vec<String>,
        within_ms: u64,
    ) -> PyResult<(i64, String, Vec<String>)> {
        let (Some(pool), Some(size)) = (self.pool()?, size.value()) else {
            return Ok((
                codes::PARAMETERS,
                "the store is not set up, or the size is missing".into(),
                Vec::new(),
            ));
        };
        let wanted = Wanted {
            masters,
            size,
            ssd,
            name,
            listen,
            advertise,
            rdma_devices,
            within: Duration::from_millis(within_ms),
        };
        Ok(match aside(py, || pool.segments.start(wanted)) {
            Ok(media) => {
                let media = media.iter().map(|path| path.display().to_string());
                (codes::OK, String::new(), media.collect())
            }
            Err(error) => {
                let code = match &error {
                    SegmentError::NotWelcome(_) | SegmentError::NotAttached { .. } => codes::RPC,
                    SegmentError::Start(_) | SegmentError::Medium { .. } => codes::PARAMETERS,
                    SegmentError::NoRuntime(_) => -1,
                };
                (code, error.to_string(), Vec::new())
            }
        })
    }

    /// Takes a segment and its blocks out of the pool.
    fn remove_segment(&self, py: Python<'_>, name: String) -> PyResult<i64> {
        let Some(pool) = self.pool()? else {
            return Ok(codes::PARAMETERS);
        };
        let was_there = aside(py, || pool.segments.stop(&name));
        Ok(if was_there {
            codes::OK
        } else {
            codes::NO_SEGMENT
        })
    }

    /// Registers memory for repeated puts and gets.
    fn register(&self, py: Python<'_>, address: Number, length: Number) -> PyResult<i64> {
        let Some(pool) = self.pool()? else {
            return Ok(codes::PARAMETERS);
        };
        let address = address.value().and_then(|at| usize::try_from(at).ok());
        let (Some(address), Some(length)) = (address, length.value()) else {
            return Ok(codes::PARAMETERS);
        };
        let registered = aside(py, || {
            lent::register(&pool.memory, address, length, |memory| {
                pool.client.register_buffer(memory)
            })
        });
        Ok(match registered {
            Ok(()) => codes::OK,
            Err(error) => {
                self.remember(Some(error.to_string()));
                codes::PARAMETERS
            }
        })
    }

    /// Ends the registration of the memory at `address` once no transfer uses it.
    fn unregister(&self, py: Python<'_>, address: Number) -> PyResult<i64> {
        let Some(pool) = self.pool()? else {
            return Ok(codes::PARAMETERS);
        };
        let Some(address) = address.value().and_then(|at| usize::try_from(at).ok()) else {
            return Ok(codes::PARAMETERS);
        };
        match aside(py, || pool.memory.unregister(address)) {
            Ok(true) => Ok(codes::OK),
            Ok(false) => Ok(codes::PARAMETERS),
            Err(error) => Err(PyRuntimeError::new_err(error.to_string())),
        }
    }

    /// 0 when the master answers, 1 when the store is not set up, 2 when the master does not answer.
    fn health(&self, py: Python<'_>) -> PyResult<i64> {
        let Some(pool) = self.pool()? else {
            return Ok(1);
        };
        let Ok(key) = Key::parse(HEALTH_KEY) else {
            return Ok(2);
        };
        Ok(
            match aside(py, || pool.client.exist(&[key], Leasing::None)) {
                Ok(_) => 0,
                Err(error) => {
                    self.remember(Some(error.to_string()));
                    2
                }
            },
        )
    }

    /// Whether the store is set up.
    fn is_set_up(&self) -> PyResult<bool> {
        Ok(self.pool()?.is_some())
    }

    /// The largest block that the pool takes, in bytes; 0 while the store is not set up.
    fn max_block(&self) -> PyResult<u64> {
        Ok(self
            .pool()?
            .map_or(0, |pool| pool.client.limits().max_block.0))
    }

    /// The reason of this thread's last failed call, where the code does not tell it; else empty.
    #[staticmethod]
    fn last_error() -> String {
        LAST_ERROR.with_borrow(String::clone)
    }

    /// The rights on the blocks of the namespace that the token lacks, as the master reports them. Empty
    /// without a token.
    ///
    /// No call returns the rights of a token. So this looks up and removes a key that no caller uses.
    fn missing_rights(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let Some(pool) = self.pool()? else {
            return Ok(Vec::new());
        };
        if Options::default().token_file.is_none() {
            return Ok(Vec::new());
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanoseconds = now.unwrap_or_default().as_nanos();
        let name = format!("kvpool/rights/{}/{nanoseconds}", std::process::id());
        let Ok(key) = Key::parse(&name) else {
            return Ok(Vec::new());
        };
        Ok(aside(py, || {
            let read = pool.client.exist(std::slice::from_ref(&key), Leasing::None);
            let removed = pool.client.remove(Remove::Keys(vec![key]), false);
            let refusals = [
                read.err().map(|error| (error.code, error.to_string())),
                removed.err().map(|error| (error.code(), error.to_string())),
            ];
            let refusals = refusals.into_iter().flatten();
            let missing = refusals.filter(|(code, _)| *code == Code::Forbidden);
            missing.map(|(_, why)| why).collect()
        }))
    }

    /// Ends the sessions, removes the segments from the pool, and closes the connection. Calls of other threads
    /// continue to their end, and `close` waits for calls that use registered memory. Returns a code, and the
    /// addresses of memory that a transfer still uses. Do not free that memory.
    fn close(&self, py: Python<'_>) -> PyResult<(i64, Vec<usize>)> {
        if self.pool()?.is_none() {
            return Ok((codes::OK, Vec::new()));
        }
        // This holds the interpreter's lock, as calls do when they take the pool and lend memory. So a call
        // that has taken the pool has also lent its memory.
        let pool = self.pool.write().take();
        self.process.store(0, Ordering::Release);
        let used = aside(py, || {
            pool.map_or_else(Vec::new, |pool| {
                pool.get_sessions.end_all();
                pool.segments.close();
                pool.memory.unregister_all()
            })
        });
        Ok((codes::OK, used))
    }
}
