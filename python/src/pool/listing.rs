//! The iterator over a pool's blocks, and what a removal leaves.

use crate::errors::Fault;
use crate::pool::answers::Listed;
use crate::pool::open::Connection;
use kvpool_client::{Listed as InList, Page};
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::sync::Arc;

/// An iterator of `Listed` over the blocks of a namespace, a page at a time. Made by `Pool.list`. Raises ClosedError
/// once the pool is closed, and an Error when the master cannot be asked.
#[pyclass(frozen, module = "kvpool")]
pub(crate) struct Listing {
    pool: Arc<Connection>,
    pattern: String,
    state: Mutex<State>,
}

struct State {
    /// What is left of the page, last first.
    page: Vec<InList>,
    next: Next,
}

#[derive(Clone)]
enum Next {
    /// Where the next page begins; `None` for the first.
    Page(Option<Page>),
    /// There is none.
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

    /// The next block, asking the master for a page when need be. Two threads may share a listing; a
    /// page that both ask for at once is given out twice.
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
