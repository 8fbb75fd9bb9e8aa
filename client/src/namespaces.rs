//! Namespaces of the pool: their settings and their use of memory and media.

use crate::client::Client;
use crate::control::Call;
use crate::errors::ControlError;
use crate::locate::malformed;
use kvpool_proto as proto;
use kvpool_types::{Length, Namespace, NamespaceSettings, Setting};

/// A namespace with its settings and its use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// The fields that its creator gave.
    pub namespace: Namespace,
    /// The quotas and limits of the namespace. Settings that this version does not know are left out.
    pub settings: NamespaceSettings,
    /// The memory in bytes that the extents of its blocks and open puts take.
    pub memory: Length,
    /// The bytes that its copies on media take, with their headers.
    pub media: Length,
    /// The number of its blocks in memory.
    pub blocks: u64,
    /// The number of its copies on media.
    pub copies: u64,
    /// The number of its open puts.
    pub open_puts: u64,
}

impl Client {
    /// Creates a namespace. Returns false when it exists with the same fields; it then keeps its settings.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`]. [`kvpool_types::Code::InvalidArgument`] when the name exists with
    /// other fields, or for settings that contradict each other.
    pub async fn create_namespace(
        &self,
        namespace: Namespace,
        settings: &NamespaceSettings,
    ) -> Result<bool, ControlError> {
        let request = proto::CreateNamespaceRequest {
            caller: None,
            namespace: Some(proto::Namespace {
                name: namespace.name,
                model: namespace.model,
                dtype: namespace.dtype,
                parallel_rank: namespace.parallel_rank,
                salt: namespace.salt,
            }),
            settings: wire_settings(settings),
        };
        let call = Call::by(self.control_deadline());
        Ok(self.inner.control.call(request, call).await?.created)
    }

    /// Changes settings of a namespace: sets the settings in `set`, and removes the settings in `clear`.
    /// Returns the namespace with its new settings, which are durable.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`]. [`kvpool_types::Code::UnknownNamespace`] without such a namespace,
    /// [`kvpool_types::Code::InvalidArgument`] for settings that contradict each other. A refused
    /// change changes nothing.
    pub async fn change_namespace(
        &self,
        name: &str,
        set: &NamespaceSettings,
        clear: &[Setting],
    ) -> Result<NamespaceInfo, ControlError> {
        let request = proto::ChangeNamespaceRequest {
            caller: None,
            name: name.to_owned(),
            set: wire_settings(set),
            clear: clear.iter().map(|setting| setting.to_wire()).collect(),
        };
        let call = Call::by(self.control_deadline());
        let reply = self.inner.control.call(request, call).await?;
        let changed = reply.namespace.map(read);
        changed.ok_or_else(|| malformed("the reply names no namespace".to_owned()))
    }

    /// Deletes a namespace. With `with_blocks`, its blocks are removed too, despite leases and pins. Returns
    /// the number of removed blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`]. [`kvpool_types::Code::NamespaceInUse`] when the namespace has blocks and
    /// `with_blocks` is false. After another error the namespace still exists, perhaps with fewer blocks.
    pub async fn delete_namespace(
        &self,
        name: &str,
        with_blocks: bool,
    ) -> Result<u64, ControlError> {
        let request = proto::DeleteNamespaceRequest {
            caller: None,
            name: name.to_owned(),
            with_blocks,
        };
        let call = Call::by(self.control_deadline()).unless_done();
        let reply = self.inner.control.call(request, call).await;
        // The namespace may have been deleted without an answer, and its name may be created again.
        self.inner.locations.purge_all();
        self.inner.releases.forget_all();
        Ok(reply?.removed)
    }

    /// One namespace with its settings and its use.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`]. [`kvpool_types::Code::UnknownNamespace`] without such a namespace.
    pub async fn namespace(&self, name: &str) -> Result<NamespaceInfo, ControlError> {
        let request = proto::ListNamespacesRequest {
            name: name.to_owned(),
            ..Default::default()
        };
        let call = Call::by(self.control_deadline());
        let reply = self.inner.control.call(request, call).await?;
        let shown = reply.namespaces.into_iter().next().map(read);
        shown.ok_or_else(|| malformed("the reply names no namespace".to_owned()))
    }

    /// All namespaces with their settings and their use, sorted by name.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`].
    pub async fn namespaces(&self) -> Result<Vec<NamespaceInfo>, ControlError> {
        let deadline = self.control_deadline();
        let mut all: Vec<NamespaceInfo> = Vec::new();
        loop {
            let after = all.last().map(|last| last.namespace.name.clone());
            let request = proto::ListNamespacesRequest {
                after: after.unwrap_or_default(),
                ..Default::default()
            };
            let reply = self.inner.control.call(request, Call::by(deadline)).await?;
            let is_empty = reply.namespaces.is_empty();
            all.extend(reply.namespaces.into_iter().map(read));
            if !reply.more || is_empty {
                return Ok(all);
            }
        }
    }
}

fn wire_settings(settings: &NamespaceSettings) -> Vec<proto::NamespaceSetting> {
    let settings = settings.iter();
    settings
        .map(|(setting, value)| proto::NamespaceSetting {
            setting: setting.to_wire(),
            value,
        })
        .collect()
}

fn read(told: proto::NamespaceUse) -> NamespaceInfo {
    let fields = told.namespace.unwrap_or_default();
    let mut settings = NamespaceSettings::default();
    for one in told.settings {
        if let Some(setting) = Setting::from_wire(one.setting) {
            settings.set(setting, Some(one.value));
        }
    }
    NamespaceInfo {
        namespace: Namespace {
            name: fields.name,
            model: fields.model,
            dtype: fields.dtype,
            parallel_rank: fields.parallel_rank,
            salt: fields.salt,
        },
        settings,
        memory: Length(told.memory_bytes),
        media: Length(told.media_bytes),
        blocks: told.blocks,
        copies: told.copies,
        open_puts: told.open_puts,
    }
}
