//! Namespaces for callers without an async runtime.

use super::Client;
use crate::errors::ControlError;
use crate::namespaces::NamespaceInfo;
use kvpool_types::{Namespace, NamespaceSettings, Setting};

impl Client {
    /// See [`crate::Client::create_namespace`].
    pub fn create_namespace(
        &self,
        namespace: Namespace,
        settings: &NamespaceSettings,
    ) -> Result<bool, ControlError> {
        self.runtimes
            .one(self.client.create_namespace(namespace, settings))
    }

    /// See [`crate::Client::change_namespace`].
    pub fn change_namespace(
        &self,
        name: &str,
        set: &NamespaceSettings,
        clear: &[Setting],
    ) -> Result<NamespaceInfo, ControlError> {
        self.runtimes
            .one(self.client.change_namespace(name, set, clear))
    }

    /// See [`crate::Client::delete_namespace`].
    pub fn delete_namespace(&self, name: &str, with_blocks: bool) -> Result<u64, ControlError> {
        self.runtimes
            .one(self.client.delete_namespace(name, with_blocks))
    }

    /// See [`crate::Client::namespace`].
    pub fn namespace(&self, name: &str) -> Result<NamespaceInfo, ControlError> {
        self.runtimes.one(self.client.namespace(name))
    }

    /// See [`crate::Client::namespaces`].
    pub fn namespaces(&self) -> Result<Vec<NamespaceInfo>, ControlError> {
        self.runtimes.one(self.client.namespaces())
    }
}
