//! The state of an open pool, which the objects that it returns share.

use crate::errors::Fault;
use crate::home::{ForkGuarded, Home, Resident, drop_aside};
use crate::memory::Memory;
use kvpool_client::blocking::Client;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

/// An open connection.
pub(crate) struct Open {
    pub(crate) client: Client,
    pub(crate) memory: Memory,
    /// The addresses of registered memory.
    pub(crate) registered: Mutex<BTreeSet<usize>>,
    /// Dropped last, after all threads of the client.
    _resident: Resident,
}

/// The hold of one user on an open connection: a call, or a registration.
///
/// The last holder of a closed connection ends it. This may take a moment, so it runs without the interpreter's
/// lock.
pub(crate) struct OpenHold(Option<Arc<ForkGuarded<Open>>>);

impl OpenHold {
    /// The process that made the connection.
    pub(crate) fn home(&self) -> Home {
        self.held().home()
    }

    /// The connection. Fails in another process.
    pub(crate) fn get(&self) -> Result<&Open, Fault> {
        self.held().get()
    }

    fn held(&self) -> &ForkGuarded<Open> {
        self.0
            .as_deref()
            .expect("invariant: the connection is held until the drop")
    }
}

impl Drop for OpenHold {
    fn drop(&mut self) {
        if let Some(last) = self.0.take().and_then(Arc::into_inner) {
            drop_aside(last);
        }
    }
}

/// A connection that can be closed. Calls in progress then continue to their end.
pub(crate) struct Connection {
    home: Home,
    open: Mutex<Option<Arc<ForkGuarded<Open>>>>,
}

impl Connection {
    /// An open connection.
    pub(crate) fn new(client: Client, resident: Resident) -> Self {
        let open = ForkGuarded::new(Open {
            client,
            memory: Memory::default(),
            registered: Mutex::default(),
            _resident: resident,
        });
        Self {
            home: open.home(),
            open: Mutex::new(Some(Arc::new(open))),
        }
    }

    /// The connection for one call. Fails if it is closed or belongs to another process.
    pub(crate) fn get(&self) -> Result<OpenHold, Fault> {
        self.home.check()?;
        let open = self.open.lock().clone();
        let open = open.ok_or_else(|| Fault::closed("the pool is closed"))?;
        Ok(OpenHold(Some(open)))
    }

    /// Closes the connection. The caller drops the result without the interpreter's lock, because that may take
    /// a moment.
    pub(crate) fn close(&self) -> Option<Arc<ForkGuarded<Open>>> {
        if !self.home.is_here() {
            return None;
        }
        self.open.lock().take()
    }

    /// Whether the connection is closed or belongs to another process.
    pub(crate) fn is_closed(&self) -> bool {
        !self.home.is_here() || self.open.lock().is_none()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Otherwise the field's own drop would end the connection in a child made by fork too.
        let open = self.open.get_mut().take();
        if self.home.is_here() {
            drop_aside(open);
        } else {
            std::mem::forget(open);
        }
    }
}
