//! The replica tasks for callers without an async runtime.

use super::Client;
use crate::errors::ControlError;
use crate::replica_tasks::{ReplicaTask, ReplicaWish};
use std::time::Duration;

impl Client {
    /// See [`crate::Client::change_replicas`].
    pub fn change_replicas(&self, wish: &ReplicaWish) -> Result<ReplicaTask, ControlError> {
        self.runtimes.one(self.client.change_replicas(wish))
    }

    /// See [`crate::Client::drain_node`].
    pub fn drain_node(&self, name: &str, force: bool) -> Result<ReplicaTask, ControlError> {
        self.runtimes.one(self.client.drain_node(name, force))
    }

    /// See [`crate::Client::drain_node_and_media`].
    pub fn drain_node_and_media(
        &self,
        name: &str,
        force: bool,
    ) -> Result<ReplicaTask, ControlError> {
        self.runtimes
            .one(self.client.drain_node_and_media(name, force))
    }

    /// See [`crate::Client::go_on_draining`].
    pub fn go_on_draining(&self, name: &str) -> Result<ReplicaTask, ControlError> {
        self.runtimes.one(self.client.go_on_draining(name))
    }

    /// See [`crate::Client::undrain_node`].
    pub fn undrain_node(&self, name: &str) -> Result<bool, ControlError> {
        self.runtimes.one(self.client.undrain_node(name))
    }

    /// See [`crate::Client::replica_tasks`].
    pub fn replica_tasks(&self, ids: &[u64]) -> Result<Vec<ReplicaTask>, ControlError> {
        self.runtimes.one(self.client.replica_tasks(ids))
    }

    /// See [`crate::Client::cancel_replica_tasks`].
    pub fn cancel_replica_tasks(&self, ids: &[u64]) -> Result<Vec<ReplicaTask>, ControlError> {
        self.runtimes.one(self.client.cancel_replica_tasks(ids))
    }

    /// See [`crate::Client::wait_replica_task`].
    pub fn wait_replica_task(
        &self,
        id: u64,
        limit: Duration,
    ) -> Result<Option<ReplicaTask>, ControlError> {
        self.runtimes.one(self.client.wait_replica_task(id, limit))
    }
}
