//! Changing, deleting and listing namespaces.

use super::Calls;
use crate::pool::{NamespaceRefused, NamespaceView};
use crate::service::refused::{Refused, refused};
use crate::service::request::{check_leads, check_term};
use crate::service::rights::Allowed;
use kvpool_proto as proto;
use kvpool_types::{Code, NamespaceSettings, Setting};

/// The most namespaces in one reply. A namespace takes less than 5 KiB, and a message at most 64
/// MiB.
const MOST_LISTED: usize = 1000;

impl Calls {
    pub(in crate::service) async fn change_namespace(
        &self,
        request: Allowed<proto::ChangeNamespaceRequest>,
    ) -> Result<proto::NamespaceReply, Refused> {
        self.admin(request.caller.as_ref())?;
        let set = read_settings(&request.set)?;
        let clear: Vec<Setting> = request
            .clear
            .iter()
            .map(|number| read_setting(*number))
            .collect::<Result<_, _>>()?;
        if let Some(setting) = clear.iter().find(|setting| set.get(**setting).is_some()) {
            let message = format!("{setting} is set and cleared at once");
            return Err(refused(Code::InvalidArgument, message));
        }
        let change = |settings: &mut NamespaceSettings| {
            for setting in clear {
                settings.set(setting, None);
            }
            for (setting, value) in set.iter() {
                settings.set(setting, Some(value));
            }
        };
        let changed = self.pool.change_namespace(&request.name, change).await;
        let changed = changed.map_err(|error| match error {
            NamespaceRefused::Settings(error) => refused(Code::InvalidArgument, error.to_string()),
            NamespaceRefused::Code(code) => refused_because(code, &request.name, "changed"),
        });
        changed?;
        let view = self.pool.namespace_view(&request.name);
        Ok(proto::NamespaceReply {
            epoch: self.pool.epoch.0,
            namespace: view.map(wire_view),
        })
    }

    pub(in crate::service) async fn delete_namespace(
        &self,
        request: Allowed<proto::DeleteNamespaceRequest>,
    ) -> Result<proto::DeleteNamespaceReply, Refused> {
        self.admin(request.caller.as_ref())?;
        let deleted = self
            .pool
            .delete_namespace(&request.name, request.with_blocks);
        let removed = deleted.await;
        let removed = removed.map_err(|code| refused_because(code, &request.name, "deleted"))?;
        Ok(proto::DeleteNamespaceReply {
            epoch: self.pool.epoch.0,
            removed,
        })
    }

    pub(in crate::service) fn list_namespaces(
        &self,
        request: Allowed<proto::ListNamespacesRequest>,
    ) -> Result<proto::ListNamespacesReply, Refused> {
        if let Some(caller) = &request.caller {
            check_term(&self.pool, caller)?;
        }
        let (views, more) = if request.name.is_empty() {
            let limit = match request.limit as usize {
                0 => MOST_LISTED,
                asked => asked.min(MOST_LISTED),
            };
            self.pool.namespaces_after(&request.after, limit)
        } else {
            let view = self
                .pool
                .namespace_view(&request.name)
                .ok_or_else(|| refused_because(Code::UnknownNamespace, &request.name, "shown"))?;
            (vec![view], false)
        };
        Ok(proto::ListNamespacesReply {
            epoch: self.pool.epoch.0,
            namespaces: views.into_iter().map(wire_view).collect(),
            more,
        })
    }

    /// Checks the caller of a request that names its namespace outside the caller's fields.
    fn admin(&self, caller: Option<&proto::Caller>) -> Result<(), Refused> {
        if let Some(caller) = caller {
            check_term(&self.pool, caller)?;
        }
        check_leads(&self.pool)
    }
}

fn refused_because(code: Code, name: &str, what: &str) -> Refused {
    let why = match code {
        Code::UnknownNamespace => "there is no such namespace",
        Code::InvalidArgument => "the default namespace always exists",
        Code::NamespaceInUse => "it has blocks or open puts; delete it with its blocks",
        Code::InProgress => "puts or copies of its blocks are under way; try again",
        Code::NotLeader => "this master is read-only",
        _ => "the change could not be made durable",
    };
    refused(code, format!("namespace {name:?} is not {what}: {why}"))
}

fn read_setting(number: u32) -> Result<Setting, Refused> {
    Setting::from_wire(number).ok_or_else(|| {
        let reason = format!("this master knows no setting {number}: upgrade it first");
        refused(Code::InvalidArgument, reason)
    })
}

/// The settings of a request.
pub(super) fn read_settings(
    wire: &[proto::NamespaceSetting],
) -> Result<NamespaceSettings, Refused> {
    let mut settings = NamespaceSettings::default();
    for one in wire {
        settings.set(read_setting(one.setting)?, Some(one.value));
    }
    Ok(settings)
}

fn wire_view(view: NamespaceView) -> proto::NamespaceUse {
    let NamespaceView { known, balance } = view;
    let settings = known.settings.iter();
    proto::NamespaceUse {
        namespace: Some(proto::Namespace {
            name: known.fields.name,
            model: known.fields.model,
            dtype: known.fields.dtype,
            parallel_rank: known.fields.parallel_rank,
            salt: known.fields.salt,
        }),
        settings: settings
            .map(|(setting, value)| proto::NamespaceSetting {
                setting: setting.to_wire(),
                value,
            })
            .collect(),
        memory_bytes: balance.memory,
        media_bytes: balance.media,
        blocks: balance.blocks,
        copies: balance.copies,
        open_puts: balance.puts,
    }
}
