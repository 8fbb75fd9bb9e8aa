//! Namespaces: creation, settings and deletion.

use super::Pool;
use super::remove::Removal;
use crate::accounts::Balance;
use crate::namespaces::{DEFAULT_ID, Known};
use crate::store::record::{self, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::namespace::Namespace;
use kvpool_types::{Code, NamespaceSettings, Setting, SettingsError};
use std::sync::Arc;
use std::time::Duration;

/// How long a deletion waits for commits, loads and copies in progress.
const DELETION_WAIT: Duration = Duration::from_secs(20);
/// The interval at which a deletion checks for them.
const DELETION_POLL: Duration = Duration::from_millis(10);

/// Why a namespace was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceRefused {
    /// The settings contradict each other, or one is out of range.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Any other reason.
    #[error("{0}")]
    Code(Code),
}

impl From<Code> for NamespaceRefused {
    fn from(code: Code) -> Self {
        Self::Code(code)
    }
}

/// A namespace with its settings and usage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceView {
    /// Its fields and settings.
    pub known: Known,
    /// Its usage.
    pub balance: Balance,
}

/// Runs `work` to its end, even if its caller leaves.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, Code> {
    // The join fails if the work panics, or if the runtime stops.
    tokio::spawn(work).await.map_err(|_| Code::Internal)
}

impl Pool {
    /// Creates a valid namespace; true if it is new. Fails if the name exists with other fields. An
    /// existing namespace keeps its settings. A creation that has begun goes on even if its caller
    /// leaves.
    pub async fn create_namespace(
        self: &Arc<Self>,
        namespace: Namespace,
        settings: NamespaceSettings,
    ) -> Result<bool, NamespaceRefused> {
        settings.validate()?;
        // Every client that connects asks for its namespace, which usually exists.
        if !self.namespaces.find_or_number(&namespace)?.1 {
            return Ok(false);
        }
        let one_at_a_time = Arc::clone(&self.namespace_creation).lock_owned().await;
        let (id, is_new) = self.namespaces.find_or_number(&namespace)?;
        if !is_new {
            return Ok(false);
        }
        if self.namespaces.count() > self.config.max_namespaces as usize {
            return Err(Code::TooManyHeld.into());
        }
        if !self.leads() {
            return Err(Code::NotLeader.into());
        }
        let mut records = vec![Record::Namespace(record::Namespace { id, namespace })];
        if !settings.is_empty() {
            records.push(Record::NamespaceSet(record::NamespaceSet { id, settings }));
        }
        let pool = Arc::clone(self);
        detached(async move {
            // The lock is held until the record is logged, so the next creation finds this one's
            // number used.
            let _until_logged = one_at_a_time;
            let (of_log, logged) = (Arc::clone(&pool), records.clone());
            let applied = move || {
                for record in logged {
                    of_log.namespaces.apply(record);
                }
                of_log.directory.accounts().set(id, &settings);
            };
            pool.log(records, applied).await
        })
        .await??;
        self.warn_of_shares();
        Ok(true)
    }

    /// Changes the settings of a namespace, and returns the new ones once they are durable. A
    /// change that has begun goes on even if its caller leaves.
    ///
    /// # Errors
    ///
    /// [`NamespaceRefused`] when the namespace is unknown, when the new settings contradict each
    /// other, when this master does not lead, or when the log refuses the record.
    pub async fn change_namespace(
        self: &Arc<Self>,
        name: &str,
        change: impl FnOnce(&mut NamespaceSettings),
    ) -> Result<NamespaceSettings, NamespaceRefused> {
        self.namespaces.resolve(name)?;
        let one_at_a_time = Arc::clone(&self.namespace_changes).lock_owned().await;
        let id = self.namespaces.resolve(name)?;
        let known = self.namespaces.get(id).ok_or(Code::UnknownNamespace)?;
        let mut settings = known.settings;
        change(&mut settings);
        settings.validate()?;
        if settings == known.settings {
            return Ok(settings);
        }
        if !self.leads() {
            return Err(Code::NotLeader.into());
        }
        let pool = Arc::clone(self);
        detached(async move {
            let _until_reordered = one_at_a_time;
            pool.set_namespace(id, settings).await
        })
        .await??;
        tracing::info!(namespace = %known.fields.name, ?settings, "namespace changed");
        self.warn_of_shares();
        Ok(settings)
    }

    /// The sum of the guaranteed shares, and the bytes by which it exceeds the high watermark of
    /// the pool. With an excess, puts may never find room. A pool without nodes has no excess.
    pub fn guaranteed(&self) -> (u64, u64) {
        let tenants = self.directory.accounts().tenants();
        let shares = tenants.iter().map(|(_, tenant)| tenant);
        let shares = shares.filter_map(|tenant| tenant.get(Setting::Guaranteed));
        let all = shares.fold(0, u64::saturating_add);
        match self.placement.usage().limit {
            0 => (all, 0),
            limit => (all, all.saturating_sub(limit)),
        }
    }

    fn warn_of_shares(&self) {
        let (shares, excess) = self.guaranteed();
        if excess > 0 {
            tracing::warn!(
                shares,
                excess,
                "guaranteed shares exceed what the pool holds: puts may fail as full"
            );
        }
    }

    async fn set_namespace(
        self: &Arc<Self>,
        id: NamespaceId,
        settings: NamespaceSettings,
    ) -> Result<(), Code> {
        let record = Record::NamespaceSet(record::NamespaceSet { id, settings });
        let was_tenant = self.directory.accounts().tenant(id).is_some();
        let pool = Arc::clone(self);
        self.log(vec![record], move || {
            pool.namespaces.set(id, settings);
            pool.directory.accounts().set(id, &settings);
        })
        .await?;
        if !was_tenant {
            // The work may read every block, so it runs on a blocking thread, outside the runtime's
            // and the log's threads.
            let pool = Arc::clone(self);
            let moved = kvpool_seams::blocking(move || pool.directory.reorder_of(id));
            moved.await.map_err(|_| Code::Internal)?;
        }
        self.evictor_wake.wake();
        Ok(())
    }

    /// Deletes a namespace. With `with_blocks` also its blocks, despite leases and pins. Returns
    /// the number of deleted blocks. After an error the namespace remains, perhaps with fewer
    /// blocks. A deletion that has begun goes on even if its caller leaves.
    pub async fn delete_namespace(
        self: &Arc<Self>,
        name: &str,
        with_blocks: bool,
    ) -> Result<u64, Code> {
        if self.namespaces.resolve(name)? == DEFAULT_ID {
            return Err(Code::InvalidArgument);
        }
        let one_at_a_time = Arc::clone(&self.namespace_deletion).lock_owned().await;
        let id = {
            // A change of the namespace that has begun must end first.
            let _no_change = self.namespace_changes.lock().await;
            let id = self.namespaces.resolve(name)?;
            if !self.leads() {
                return Err(Code::NotLeader);
            }
            self.namespaces.begin_deletion(id);
            id
        };
        let (pool, name) = (Arc::clone(self), name.to_owned());
        detached(async move {
            let _until_deleted = one_at_a_time;
            pool.finish_deletion(id, &name, with_blocks).await
        })
        .await?
    }

    async fn finish_deletion(
        self: &Arc<Self>,
        id: NamespaceId,
        name: &str,
        with_blocks: bool,
    ) -> Result<u64, Code> {
        let account = self.directory.accounts().of(id);
        account.close(true);
        let deleted = self.empty_and_forget(id, with_blocks).await;
        match deleted {
            Ok(removed) => tracing::info!(namespace = %name, removed, "namespace deleted"),
            Err(code) => {
                account.close(false);
                self.namespaces.give_up_deletion(id);
                tracing::warn!(namespace = %name, %code, "namespace not deleted");
            }
        }
        deleted
    }

    async fn empty_and_forget(
        self: &Arc<Self>,
        id: NamespaceId,
        with_blocks: bool,
    ) -> Result<u64, Code> {
        let account = self.directory.accounts().of(id);
        // A copy whose record is being appended is not counted yet. After this call no further copy
        // is recorded.
        self.record_no_transfer();
        self.flush_log().await?;
        let is_used = |balance: &Balance| *balance != Balance::default();
        if !with_blocks && is_used(&account.balance()) {
            return Err(Code::NamespaceInUse);
        }
        let deadline = tokio::time::Instant::now() + DELETION_WAIT;
        let mut removed = 0;
        while is_used(&account.balance()) {
            let ended = self.reservations.lock().take_in(id);
            self.end_reservations(ended);
            let report = self.remove_all(&Removal::Namespace(id), true).await?;
            removed += report.removed;
            if is_used(&account.balance()) {
                if tokio::time::Instant::now() >= deadline || self.is_stopping() {
                    return Err(Code::InProgress);
                }
                tokio::time::sleep(DELETION_POLL).await;
            }
        }
        let pool = Arc::clone(self);
        let record = Record::NamespaceGone(record::NamespaceGone { id });
        self.log(vec![record], move || {
            pool.namespaces.remove(id);
            let none = NamespaceSettings::default();
            pool.directory.accounts().set(id, &none);
        })
        .await?;
        Ok(removed)
    }

    /// At most `limit` namespaces whose names follow `after`, in the order of the names, and
    /// whether more follow.
    pub fn namespaces_after(&self, after: &str, limit: usize) -> (Vec<NamespaceView>, bool) {
        let mut names = self.namespaces.names();
        names.retain(|name| name.as_str() > after);
        let more = names.len() > limit;
        names.truncate(limit);
        let views = names.iter().filter_map(|name| self.namespace_view(name));
        (views.collect(), more)
    }

    /// One namespace by name; `None` when it is unknown.
    pub fn namespace_view(&self, name: &str) -> Option<NamespaceView> {
        let id = self.namespaces.resolve(name).ok()?;
        Some(NamespaceView {
            known: self.namespaces.get(id)?,
            balance: self.directory.accounts().balance(id),
        })
    }

    /// The sums over all namespaces.
    pub fn balance(&self) -> Balance {
        self.directory.accounts().total()
    }

    /// The sums of [`Pool::balance`], counted from segments, media and directories. At rest both
    /// are equal.
    pub fn counted_balance(&self) -> Balance {
        let memory = {
            let segments = self.placement.segments();
            let used = segments.iter().map(|s| s.used() - s.quarantined());
            used.sum()
        };
        let media = self.tier.media();
        Balance {
            memory,
            media: media.iter().map(|medium| medium.used().0).sum(),
            blocks: self.directory.blocks(),
            copies: self.tier.directory().blocks(),
            puts: self.reservations.len() as u64,
            reserved: self.reservations.lock().bytes(),
            resident: self.directory.footprint(),
        }
    }

    /// Counts a call against the rates of its namespace. An error holds the code of the exceeded
    /// rate, and the time until it allows a call. Costs one load without tenants.
    #[inline]
    pub fn admit(&self, namespace: NamespaceId, moves_bytes: bool) -> Result<(), (Code, Duration)> {
        match self.directory.accounts().tenant(namespace) {
            Some(tenant) => tenant.admit(self.now(), moves_bytes),
            None => Ok(()),
        }
    }

    /// Counts the bytes that an admitted call moves against its namespace's rates. `bytes` is
    /// called only for a tenant.
    #[inline]
    pub fn moved(&self, namespace: NamespaceId, bytes: impl FnOnce() -> u64) {
        if let Some(tenant) = self.directory.accounts().tenant(namespace) {
            tenant.moved(bytes(), self.now());
        }
    }

    /// The id of a namespace by name.
    ///
    /// # Errors
    ///
    /// [`Code::UnknownNamespace`].
    pub fn namespace(&self, name: &str) -> Result<NamespaceId, Code> {
        self.namespaces.resolve(name)
    }
}
