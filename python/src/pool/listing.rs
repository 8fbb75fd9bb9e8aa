//! The iterator over a pool's blocks.

use crate::errors::Fault;
use crate::pool::answers::Listed;
use crate::pool::open::Connection;
use kvpool_client::{Listed as InList, Page};
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::sync::Arc;

/// An iterator of `Listed` over the blocks of a namespace, fetched page by page. `Pool.list` makes it. Raises
/// ClosedError once the pool is closed, and an Error when the master cannot be asked.
#[pyclass(frozen, module = "kvpool")]
pub(crate) struct Listing {
    pool: Arc<Connection>,
    pattern: String,
    state: Mutex<State>,
}

struct State {
    /// The rest of the page, last block first.
    page: Vec<InList>,
    next: Next,
}

#[derive(Clone)]
enum Next {
    /// The start of the next page; `None` for the first page.
    Page(Option<Page>),
    /// No page is left.
    End,
}

impl Listing {
    pub(crate) fn new(pool: Arc<Connection>, pattern: String) -> Self {
        let state = State {
            page: Vec::new(),
            next: Next::Page(None),
        };
        Self {
            pool,
            pattern,
            state: Mutex::new(state),
        }
    }

    /// The next block. Asks the master for a page when necessary. Two threads may share a listing. A page that
    /// both ask for at the same time is returned twice.
    fn next(&self) -> Result<Option<InList>, Fault> {
        loop {
            let open = self.pool.get()?;
            let next = {
                let mut state = self.state.lock();
                if let Some(block) = state.page.pop() {
                    return Ok(Some(block));
                }
                state.next.clone()
            };
            let Next::Page(page) = next else {
                return Ok(None);
            };
            let client = &open.get()?.client;
            let mut listing = client.list(&self.pattern, 0, page.as_ref())?;
            listing.blocks.reverse();
            let mut state = self.state.lock();
            state.page = listing.blocks;
            state.next = listing
                .next
                .map_or(Next::End, |page| Next::Page(Some(page)));
        }
    }
}

#[pymethods]
impl Listing {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Listed>> {
        let block = py.detach(|| self.next())?;
        Ok(block.map(Listed::from))
    }
}
