//! Reading and making long lists, at a few nanoseconds an item.

// UNSAFETY: reads the items of a list without counting references to them. Reads strings and bytes objects
// after a single type check.
#![allow(
    unsafe_code,
    reason = "thousands of keys are read a call; counting each costs more than asking the master"
)]

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};
use pyo3::{Borrowed, PyTypeInfo, ffi};

/// Calls `each` for every item of a list, in order.
///
/// # Safety
///
/// `each` must run no Python code while it uses the item, because that code could remove the item from the
/// list.
pub(super) unsafe fn for_each_borrowed<'py>(
    list: &Bound<'py, PyList>,
    mut each: impl FnMut(&Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    let py = list.py();
    for at in 0..ffi::Py_ssize_t::try_from(list.len())? {
        // SAFETY: the list is a list, and the interpreter's lock is held.
        let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), at) };
        // SAFETY: the item is null with an exception set, or is in the list. It stays in the list while the
        // lock is held and no Python code runs.
        let item = unsafe { Borrowed::from_ptr_or_err(py, item) }?;
        each(&item)?;
    }
    Ok(())
}

/// The text of a string, or an error if it is not UTF-8; `None` for an object that is no string.
pub(super) fn text_of<'a>(object: &'a Bound<'_, PyAny>) -> Option<PyResult<&'a str>> {
    if !is::<PyString>(object) {
        return None;
    }
    let mut size = 0;
    // SAFETY: the object is a string and alive.
    let start = unsafe { ffi::PyUnicode_AsUTF8AndSize(object.as_ptr(), &raw mut size) };
    let Some(size) = usize::try_from(size).ok().filter(|_| !start.is_null()) else {
        return Some(Err(PyErr::fetch(object.py())));
    };
    // SAFETY: `start` points to `size` bytes, which never change while the object is borrowed.
    let text = unsafe { std::slice::from_raw_parts(start.cast(), size) };
    // SAFETY: the interpreter has encoded these bytes as UTF-8.
    Some(Ok(unsafe { std::str::from_utf8_unchecked(text) }))
}

/// The bytes of a bytes object; `None` for any other object.
pub(super) fn bytes_of<'a>(object: &'a Bound<'_, PyAny>) -> Option<&'a [u8]> {
    if !is::<PyBytes>(object) {
        return None;
    }
    let (mut start, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the object is a bytes object and alive.
    let code =
        unsafe { ffi::PyBytes_AsStringAndSize(object.as_ptr(), &raw mut start, &raw mut size) };
    let size = usize::try_from(size).ok().filter(|_| code == 0)?;
    // SAFETY: `start` points to `size` bytes, which never change while the object is borrowed.
    Some(unsafe { std::slice::from_raw_parts(start.cast_const().cast(), size) })
}

/// Whether an object is an instance of a type. The exact type is the common case, and its check needs no call.
fn is<T: PyTypeInfo>(object: &Bound<'_, PyAny>) -> bool {
    object.is_exact_instance_of::<T>() || object.is_instance_of::<T>()
}

/// A list of values most of which are equal. Copies the first value to every place at once, then sets the
/// others.
pub(crate) fn list_of_alike<'py, T>(py: Python<'py>, values: &[T]) -> PyResult<Bound<'py, PyList>>
where
    T: Copy + PartialEq + IntoPyObject<'py>,
{
    let Some(first) = values.first().copied() else {
        return Ok(PyList::empty(py));
    };
    let list = PyList::new(py, [first])?
        .as_sequence()
        .repeat(values.len())?
        .cast_into::<PyAny>()?
        .cast_into::<PyList>()?;
    for (at, value) in values
        .iter()
        .enumerate()
        .filter(|(_, value)| **value != first)
    {
        list.set_item(at, *value)?;
    }
    Ok(list)
}
