//! Namespaces with their quotas and limits: Python programs create, change and watch them.

use super::Pool;
use super::answers::shown;
use super::options::Whole;
use crate::errors::Fault;
use crate::keys::Namespace;
use kvpool_client::NamespaceInfo as Info;
use kvpool_types::{NamespaceSettings, Setting};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// A namespace with its settings and use.
///
/// `name`, `model`, `dtype`, `parallel_rank`, `salt`: as the creator of the namespace gave them.
/// `settings`: dict of the namespace's settings by name; see `Pool.create_namespace`.
/// `memory`: bytes of its blocks and open puts. `media`: bytes of its copies on SSD, with their headers.
/// `blocks`: its blocks in memory. `copies`: its copies on SSD. `open_puts`: its puts that have not ended.
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct NamespaceInfo {
    name: String,
    model: String,
    dtype: String,
    parallel_rank: String,
    salt: String,
    settings: BTreeMap<&'static str, u64>,
    memory: u64,
    media: u64,
    blocks: u64,
    copies: u64,
    open_puts: u64,
}

shown! {
    NamespaceInfo: name, settings, memory, media, blocks, copies, open_puts;
}

impl From<Info> for NamespaceInfo {
    fn from(info: Info) -> Self {
        let settings = info.settings.iter();
        Self {
            name: info.namespace.name,
            model: info.namespace.model,
            dtype: info.namespace.dtype,
            parallel_rank: info.namespace.parallel_rank,
            salt: info.namespace.salt,
            settings: settings
                .map(|(setting, value)| (setting.label(), value))
                .collect(),
            memory: info.memory.0,
            media: info.media.0,
            blocks: info.blocks,
            copies: info.copies,
            open_puts: info.open_puts,
        }
    }
}

fn read_setting(name: &str) -> Result<Setting, Fault> {
    Setting::from_label(name).ok_or_else(|| {
        let known: Vec<&str> = Setting::ALL.iter().map(|one| one.label()).collect();
        Fault::invalid(format!(
            "a setting is one of {}, not {name:?}",
            known.join(", ")
        ))
    })
}

/// The settings with a value, and the settings to end.
fn read_settings(
    settings: &BTreeMap<String, Option<Whole>>,
) -> Result<(NamespaceSettings, Vec<Setting>), Fault> {
    let mut set = NamespaceSettings::default();
    let mut clear = Vec::new();
    for (name, value) in settings {
        let setting = read_setting(name)?;
        match value {
            Some(value) => set.set(setting, Some(value.read(name)?)),
            None => clear.push(setting),
        }
    }
    Ok((set, clear))
}

#[pymethods]
impl Pool {
    /// Creates a namespace with settings, and returns True. If a namespace with the same fields exists, it
    /// keeps its own settings, and the result is False.
    ///
    /// `settings`: dict of a setting's name and its value, an int. In bytes: `memory_soft`, `memory_hard`,
    /// `media_hard`, `guaranteed`, `bytes_per_second`. In blocks: `blocks_soft`, `blocks_hard`. Others:
    /// `priority` (0 to 9), `requests_per_second`. docs/operations/tenancy.md describes each setting.
    ///
    /// Raises InvalidArgumentError for settings that contradict each other, and for a name that exists with
    /// other fields or, when `settings` are given, with other settings.
    #[pyo3(signature = (namespace, settings=BTreeMap::new()))]
    fn create_namespace(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        settings: BTreeMap<String, Whole>,
    ) -> PyResult<bool> {
        let settings = settings.into_iter();
        let settings = settings.map(|(name, value)| (name, Some(value))).collect();
        let (set, _) = read_settings(&settings)?;
        let fields = namespace.fields();
        Ok(self.call(py, |client| client.create_namespace(fields, &set))?)
    }

    /// Changes settings of a namespace, durably, and returns its `NamespaceInfo`. The value None ends a
    /// setting. Other settings stay unchanged.
    ///
    /// Raises an Error with the code `unknown_namespace`, and InvalidArgumentError for settings that contradict
    /// each other. A refused change changes nothing.
    fn change_namespace(
        &self,
        py: Python<'_>,
        name: &str,
        settings: BTreeMap<String, Option<Whole>>,
    ) -> PyResult<NamespaceInfo> {
        let (set, clear) = read_settings(&settings)?;
        let changed = self.call(py, |client| client.change_namespace(name, &set, &clear))?;
        Ok(changed.into())
    }

    /// Deletes a namespace. With `blocks`, also removes its blocks, despite leases and pins. Returns the number
    /// of these blocks.
    ///
    /// Raises an Error with the code `namespace_in_use` if the namespace has blocks or open puts and `blocks`
    /// is False. Raises an Error with the code `unknown_namespace` for an unknown name.
    #[pyo3(signature = (name, *, blocks=false))]
    fn delete_namespace(&self, py: Python<'_>, name: &str, blocks: bool) -> PyResult<u64> {
        Ok(self.call(py, |client| client.delete_namespace(name, blocks))?)
    }

    /// Returns the `NamespaceInfo` of one namespace. Raises an Error with the code `unknown_namespace` for an
    /// unknown name.
    fn namespace(&self, py: Python<'_>, name: &str) -> PyResult<NamespaceInfo> {
        Ok(self.call(py, |client| client.namespace(name))?.into())
    }

    /// Returns the `NamespaceInfo` of every namespace, sorted by name. With tokens the call needs the role
    /// operator, or admin in every namespace. Another role raises an Error with the code `forbidden`.
    fn namespaces(&self, py: Python<'_>) -> PyResult<Vec<NamespaceInfo>> {
        let all = self.call(py, |client| client.namespaces())?;
        Ok(all.into_iter().map(NamespaceInfo::from).collect())
    }
}
