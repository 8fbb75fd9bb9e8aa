//! The namespaces of the pool, by name.

use kvpool_types::Code;
use kvpool_types::ids::NamespaceId;
use kvpool_types::namespace::{DEFAULT_NAME, Namespace};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The default namespace, for callers that name none. It always exists.
const DEFAULT_ID: NamespaceId = NamespaceId(0);

/// Every known namespace. Ids ascend and are never reused.
#[derive(Debug)]
pub struct Namespaces {
    by_name: RwLock<HashMap<String, (NamespaceId, Namespace)>>,
}

impl Default for Namespaces {
    fn default() -> Self {
        let default = Namespace {
            name: DEFAULT_NAME.into(),
            ..Default::default()
        };
        let by_name = HashMap::from([(DEFAULT_NAME.to_owned(), (DEFAULT_ID, default))]);
        Self {
            by_name: RwLock::new(by_name),
        }
    }
}

impl Namespaces {
    /// The id of a namespace; the empty name is the default namespace.
    pub fn resolve(&self, name: &str) -> Result<NamespaceId, Code> {
        if name.is_empty() || name == DEFAULT_NAME {
            return Ok(DEFAULT_ID);
        }
        self.by_name
            .read()
            .get(name)
            .map(|(id, _)| *id)
            .ok_or(Code::UnknownNamespace)
    }

    /// Finds a namespace, or picks the id under which [`Namespaces::insert`] may add it. Fails when
    /// the name exists with other fields.
    pub fn find_or_number(&self, wanted: &Namespace) -> Result<(NamespaceId, bool), Code> {
        let by_name = self.by_name.read();
        match by_name.get(&wanted.name) {
            // The default namespace accepts any fields, because nothing is seeded by it.
            Some((id, known)) if known == wanted || *id == DEFAULT_ID => Ok((*id, false)),
            Some(_) => Err(Code::InvalidArgument),
            None => {
                let next = by_name.values().map(|(id, _)| id.0).max().unwrap_or(0) + 1;
                Ok((NamespaceId(next), true))
            }
        }
    }

    /// Adds a namespace under its id.
    pub fn insert(&self, id: NamespaceId, namespace: Namespace) {
        if let Entry::Vacant(entry) = self.by_name.write().entry(namespace.name.clone()) {
            entry.insert((id, namespace));
        }
    }

    /// Every namespace except the default one, for snapshots.
    pub fn created(&self) -> Vec<(NamespaceId, Namespace)> {
        let mut all: Vec<_> = self
            .by_name
            .read()
            .values()
            .filter(|(id, _)| *id != DEFAULT_ID)
            .cloned()
            .collect();
        all.sort_by_key(|(id, _)| *id);
        all
    }

    /// The number of namespaces, with the default one.
    pub fn count(&self) -> usize {
        self.by_name.read().len()
    }

    /// Calls `f` with each namespace, in any order.
    pub fn each(&self, mut f: impl FnMut(NamespaceId, &str)) {
        for (name, (id, _)) in &*self.by_name.read() {
            f(*id, name);
        }
    }

    /// Every name, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.by_name.read().keys().cloned().collect();
        names.sort();
        names
    }
}
