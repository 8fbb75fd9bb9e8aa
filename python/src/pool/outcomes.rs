//! Batches: the keys for the client, the keys that fail before, and one result for each key.

use super::buffers::Unwritten;
use crate::errors::Fault;
use crate::keys::{for_each, read_key};
use crate::loan::Loan;
use kvpool_client::GetOutcome;
use kvpool_types::{Code, Key};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::time::Instant;

/// One key of a batch: `None` if the client is asked about it, else its fault.
pub(super) type Planned = Option<Fault>;

/// Plans one key: the client is asked about it, or it has a fault.
pub(super) fn plan_one<T>(one: Result<T, Fault>, plan: &mut Vec<Planned>, asked: &mut Vec<T>) {
    plan.push(match one {
        Ok(one) => {
            asked.push(one);
            None
        }
        Err(fault) => Some(fault),
    });
}

/// The outcomes of the keys that the client was asked about and the faults of the others, in order.
pub(super) fn merge<T, E: Into<Fault>>(
    plan: Vec<Planned>,
    outcomes: Vec<Result<T, E>>,
) -> Vec<Result<T, Fault>> {
    let mut outcomes = outcomes.into_iter();
    let mut next = || match outcomes.next() {
        Some(outcome) => outcome.map_err(Into::into),
        None => Err(Fault::new(
            Code::Internal,
            "internal fault: the call has no outcome",
        )),
    };
    plan.into_iter()
        .map(|fault| fault.map_or_else(&mut next, Err))
        .collect()
}

pub(super) fn uneven(what: &str) -> PyErr {
    Fault::invalid(format!("there are not as many {what} as keys")).into()
}

pub(super) fn read_parents(
    parents: &Bound<'_, PyAny>,
    keys: usize,
) -> PyResult<Vec<Result<Option<Key>, Fault>>> {
    let mut read = Vec::with_capacity(keys);
    for_each(parents, "parents", |parent| {
        read.push(if parent.is_none() {
            Ok(None)
        } else {
            read_key(parent)?.map(Some)
        });
        Ok(())
    })?;
    if read.len() == keys {
        Ok(read)
    } else {
        Err(uneven("parents"))
    }
}

/// One result for each key: the value that `show` makes of an outcome, or an exception object. Raises the
/// exception of a signal handler that ran during the call.
pub(super) fn answers<'py, T>(
    py: Python<'py>,
    outcomes: Vec<Result<T, Fault>>,
    show: impl Fn(T) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    if let Some(raised) = crate::interrupts::raised() {
        return Err(raised);
    }
    let shown = outcomes.into_iter().map(|outcome| match outcome {
        Ok(outcome) => show(outcome),
        Err(fault) => fault.into_value(py),
    });
    PyList::new(py, shown.collect::<PyResult<Vec<_>>>()?)
}

/// The outcome of a batch of one key.
pub(super) fn only<T>(outcomes: Vec<Result<T, Fault>>) -> Result<T, Fault> {
    let outcome = outcomes.into_iter().next();
    outcome.unwrap_or_else(|| {
        Err(Fault::new(
            Code::Internal,
            "internal fault: the call has no outcome",
        ))
    })
}

/// A Python bool.
pub(super) fn truth(py: Python<'_>, is: bool) -> Bound<'_, PyAny> {
    pyo3::types::PyBool::new(py, is).to_owned().into_any()
}

/// The result of a get into new memory. Waits until no transfer uses the memory, and returns the last of
/// `rooms`.
pub(super) fn finish<'py>(
    py: Python<'py>,
    (loan, deadline): (Loan, Instant),
    found: Result<GetOutcome, Fault>,
    mut rooms: Vec<Unwritten>,
    failure: Option<PyErr>,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    if let Err(still_lent) = py.detach(|| loan.returned_after(deadline)) {
        // The memory is never freed, because bytes may still arrive there.
        std::mem::forget(rooms);
        return Err(Fault::still_lent(still_lent).into());
    }
    if let Some(failure) = failure {
        return Err(failure);
    }
    Ok(match (found?, rooms.pop()) {
        (GetOutcome::Hit { length, .. }, Some(room)) => Some(room.written(py, length)),
        _ => None,
    })
}
