//! The options of calls, read from Python.

use crate::errors::Fault;
use crate::keys::Namespace;
use kvpool_client::{ClientFiles, Options, PutOptions, Timeouts, TransportChoice, masters};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::path::PathBuf;
use std::time::Duration;

/// The longest timeout of a call, in seconds: over eleven days.
const LONGEST: f64 = 1e6;

/// The most replicas of a put. A larger number is a mistake of the caller.
const MOST_REPLICAS: u64 = 64;

/// Any Python int. An int outside the range is an invalid argument with its name, not an OverflowError.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Whole(Option<u64>);

impl Whole {
    /// The default of an option with the value 1.
    pub(crate) const ONE: Self = Self(Some(1));

    /// The number.
    pub(crate) fn read(self, what: &str) -> Result<u64, Fault> {
        let range = || Fault::invalid(format!("{what} is a whole number from 0 to 2**64 - 1"));
        self.0.ok_or_else(range)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Whole {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<u64>() {
            Ok(value) => Ok(Self(Some(value))),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Ok(Self(None)),
            Err(error) => Err(error),
        }
    }
}

/// A Python int for a whole number of Rust. An int outside its range is an invalid argument, not an OverflowError.
/// A note on the exception names the argument.
pub(crate) struct Int<T>(pub(crate) T);

impl<'a, 'py, T: TryFrom<u64>> FromPyObject<'a, 'py> for Int<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let Whole(number) = object.extract::<Whole>()?;
        let number = number.and_then(|number| T::try_from(number).ok());
        number.map(Self).ok_or_else(|| {
            let bits = 8 * size_of::<T>();
            Fault::invalid(format!(
                "out of range: a whole number from 0 to 2**{bits} - 1 is needed"
            ))
            .into()
        })
    }
}

/// Reads a time in seconds.
pub(crate) fn seconds(what: &str, value: f64) -> Result<Duration, Fault> {
    // The comparison is false for NaN.
    if (0.0..=LONGEST).contains(&value) {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err(Fault::invalid(format!(
            "{what} is a number of seconds from 0 to {LONGEST}, not {value}"
        )))
    }
}

/// Reads an optional time in seconds.
pub(crate) fn some_seconds(what: &str, value: Option<f64>) -> Result<Option<Duration>, Fault> {
    value.map(|value| seconds(what, value)).transpose()
}

/// The times of `Pool.connect`, in seconds. `None` means the client's default.
pub(crate) struct ConnectTimes {
    pub(crate) connect: f64,
    pub(crate) put: Option<f64>,
    pub(crate) get: Option<f64>,
    pub(crate) control: Option<f64>,
    pub(crate) spin: f64,
}

/// The client's options for `Pool.connect`.
pub(crate) fn connect_options(
    master: Option<&Bound<'_, PyAny>>,
    namespace: Option<&Namespace>,
    transport: &str,
    token: String,
    token_file: Option<PathBuf>,
    tls: ClientFiles,
    times: &ConnectTimes,
) -> PyResult<Options> {
    let defaults = Timeouts::default();
    let or = |what, value, default| {
        some_seconds(what, value).map(|read: Option<Duration>| read.unwrap_or(default))
    };
    let usual = Options::default();
    Ok(Options {
        masters: master.map_or(Ok(usual.masters), read_masters)?,
        namespace: namespace.map(Namespace::fields).unwrap_or_default(),
        transport: read_transport(transport)?,
        timeouts: Timeouts {
            connect: seconds("timeout", times.connect)?,
            put: or("put_timeout", times.put, defaults.put)?,
            get: or("get_timeout", times.get, defaults.get)?,
            control: or("control_timeout", times.control, defaults.control)?,
        },
        spin: seconds("spin", times.spin)?,
        token: token.into(),
        token_file: token_file.or(usual.token_file),
        tls,
        ..Options::default()
    })
}

fn read_masters(master: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if let Ok(list) = master.cast::<PyString>() {
        return Ok(masters(list.to_str()?));
    }
    let mut named = Vec::new();
    crate::keys::for_each(master, "master", |one| match one.cast::<PyString>() {
        Ok(one) => {
            named.push(one.to_str()?.to_owned());
            Ok(())
        }
        Err(_) => Err(PyTypeError::new_err("a master is a str")),
    })?;
    Ok(named)
}

fn read_transport(name: &str) -> Result<TransportChoice, Fault> {
    Ok(match name {
        "auto" => TransportChoice::Auto,
        "shm" => TransportChoice::Shm,
        "rdma" => TransportChoice::Rdma,
        "tcp" => TransportChoice::Tcp,
        other => {
            return Err(Fault::invalid(format!(
                "transport is 'auto', 'shm', 'rdma' or 'tcp', not {other:?}"
            )));
        }
    })
}

/// One name, or several in order.
#[derive(FromPyObject)]
pub(crate) enum Names {
    One(String),
    Several(Vec<String>),
}

impl Names {
    fn into_list(self) -> Vec<String> {
        match self {
            Self::One(name) => vec![name],
            Self::Several(names) => names,
        }
    }
}

/// The options of a put, under the names of `put` and `batch_put`.
#[derive(Default)]
pub(crate) struct PutWords {
    pub(crate) replicas: Whole,
    pub(crate) preferred_node: Option<Names>,
    pub(crate) prefer_same_host: bool,
    pub(crate) soft_pin: Option<f64>,
    pub(crate) hard_pin: bool,
    pub(crate) upsert: bool,
    pub(crate) timeout: Option<f64>,
}

impl PutWords {
    /// The client's form of these options.
    pub(crate) fn read(self) -> Result<PutOptions, Fault> {
        let replicas = self.replicas.read("replicas")?;
        if !(1..=MOST_REPLICAS).contains(&replicas) {
            return Err(Fault::invalid(format!(
                "replicas is a number from 1 to {MOST_REPLICAS}, not {replicas}"
            )));
        }
        Ok(PutOptions {
            replicas: u32::try_from(replicas).unwrap_or(u32::MAX),
            preferred_nodes: self
                .preferred_node
                .map(Names::into_list)
                .unwrap_or_default(),
            prefer_same_host: self.prefer_same_host,
            soft_pin: some_seconds("soft_pin", self.soft_pin)?,
            hard_pin: self.hard_pin,
            upsert: self.upsert,
            timeout: some_seconds("timeout", self.timeout)?,
        })
    }
}
