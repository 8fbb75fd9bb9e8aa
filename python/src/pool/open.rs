//! What a pool holds while it is open, shared by what it hands out.

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
    /// Where the memory begins that is registered.
    pub(crate) registered: Mutex<BTreeSet<usize>>,
    /// Goes last.
    _resident: Resident,
}

/// A connection that can be closed. What is under way then goes on until its end.
pub(crate) struct Connection {
    home: Home,
    open: Mutex<Option<Arc<ForkGuarded<Open>>>>,
}

impl Connection {
    /// An open one.
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

    /// The connection for the length of a call; a fault when it is closed, or was made by another
    /// process.
    pub(crate) fn get(&self) -> Result<Arc<ForkGuarded<Open>>, Fault> {
        self.home.check()?;
        let open = self.open.lock().clone();
        open.ok_or_else(|| Fault::closed("the pool is closed"))
    }

    /// Closes it. What was open is for the caller to drop, without the interpreter's lock, as that may
    /// take a moment.
    pub(crate) fn close(&self) -> Option<Arc<ForkGuarded<Open>>> {
        if !self.home.is_here() {
            return None;
        }
        self.open.lock().take()
    }

    /// Whether it is closed, as seen from this process.
    pub(crate) fn is_closed(&self) -> bool {
        !self.home.is_here() || self.open.lock().is_none()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Without this the field's own drop would take the connection apart in a child too.
        let open = self.open.get_mut().take();
        if self.home.is_here() {
            drop_aside(open);
        } else {
            std::mem::forget(open);
        }
    }
}
