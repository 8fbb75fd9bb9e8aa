//! The namespaces of the pool, by name.

use crate::store::record::{self, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::namespace::{DEFAULT_NAME, Namespace};
use kvpool_types::{Code, NamespaceSettings};
use parking_lot::RwLock;
use std::collections::{BTreeMap, HashMap};

/// The default namespace, for callers that name no namespace. It always exists.
pub const DEFAULT_ID: NamespaceId = NamespaceId(0);

/// The bound of namespace ids: interned keys use the numbers from 2^31 on.
const MOST_IDS: u32 = 1 << 31;

/// One namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The fields that its creator gave.
    pub fields: Namespace,
    /// Its quotas and limits.
    pub settings: NamespaceSettings,
}

#[derive(Debug)]
struct Table {
    by_name: HashMap<String, NamespaceId>,
    by_id: BTreeMap<NamespaceId, Known>,
    /// The id of the next namespace.
    next: u32,
    /// Namespaces that are being deleted: no call finds them.
    leaving: Vec<NamespaceId>,
}

/// Every known namespace. Ids ascend and are never reused, even after a deletion.
#[derive(Debug)]
pub struct Namespaces {
    table: RwLock<Table>,
}

impl Default for Namespaces {
    fn default() -> Self {
        let fields = Namespace {
            name: DEFAULT_NAME.into(),
            ..Default::default()
        };
        let known = Known {
            fields,
            ..Known::default()
        };
        Self {
            table: RwLock::new(Table {
                by_name: HashMap::from([(DEFAULT_NAME.to_owned(), DEFAULT_ID)]),
                by_id: BTreeMap::from([(DEFAULT_ID, known)]),
                next: DEFAULT_ID.0 + 1,
                leaving: Vec::new(),
            }),
        }
    }
}

impl Namespaces {
    /// The id of a namespace; the empty name is the default namespace. A namespace that is being
    /// deleted is unknown.
    ///
    /// # Errors
    ///
    /// [`Code::UnknownNamespace`].
    pub fn resolve(&self, name: &str) -> Result<NamespaceId, Code> {
        if name.is_empty() || name == DEFAULT_NAME {
            return Ok(DEFAULT_ID);
        }
        let table = self.table.read();
        let id = table.by_name.get(name).copied();
        id.filter(|id| !table.leaving.contains(id))
            .ok_or(Code::UnknownNamespace)
    }

    /// Finds a namespace, or picks the id under which [`Namespaces::insert`] may add it. Fails when
    /// the name exists with other fields, or is being deleted.
    pub fn find_or_number(&self, wanted: &Namespace) -> Result<(NamespaceId, bool), Code> {
        let table = self.table.read();
        let Some(id) = table.by_name.get(&wanted.name).copied() else {
            let is_left = table.next < MOST_IDS;
            return is_left
                .then_some((NamespaceId(table.next), true))
                .ok_or(Code::TooManyHeld);
        };
        if table.leaving.contains(&id) {
            return Err(Code::InProgress);
        }
        let known = table.by_id.get(&id);
        // The default namespace accepts any fields, because no seed is made from its fields.
        if id == DEFAULT_ID || known.is_some_and(|known| known.fields == *wanted) {
            Ok((id, false))
        } else {
            Err(Code::InvalidArgument)
        }
    }

    /// Adds a namespace under its id.
    pub fn insert(&self, id: NamespaceId, fields: Namespace) {
        let mut table = self.table.write();
        table.note(id);
        if !table.by_name.contains_key(&fields.name) && !table.by_id.contains_key(&id) {
            table.by_name.insert(fields.name.clone(), id);
            let known = Known {
                fields,
                ..Known::default()
            };
            table.by_id.insert(id, known);
        }
    }

    /// Sets the settings of a namespace; false when it is unknown.
    pub fn set(&self, id: NamespaceId, settings: NamespaceSettings) -> bool {
        let mut table = self.table.write();
        let known = table.by_id.get_mut(&id);
        known.map(|known| known.settings = settings).is_some()
    }

    /// Forgets a namespace. Its id is not used again.
    pub fn remove(&self, id: NamespaceId) {
        let mut table = self.table.write();
        table.note(id);
        table.leaving.retain(|other| *other != id);
        if let Some(known) = table.by_id.remove(&id) {
            table.by_name.remove(&known.fields.name);
        }
    }

    /// Begins a deletion: no call finds the namespace until the end.
    pub fn begin_deletion(&self, id: NamespaceId) {
        self.table.write().leaving.push(id);
    }

    /// Ends a deletion that failed: calls find the namespace again.
    pub fn give_up_deletion(&self, id: NamespaceId) {
        self.table.write().leaving.retain(|other| *other != id);
    }

    /// True while a namespace exists and is not being deleted.
    pub fn is_known(&self, id: NamespaceId) -> bool {
        let table = self.table.read();
        table.by_id.contains_key(&id) && !table.leaving.contains(&id)
    }

    /// Records from which a load rebuilds this table.
    pub fn records(&self) -> Vec<Record> {
        let table = self.table.read();
        let mut records = Vec::new();
        for (id, known) in &table.by_id {
            if *id != DEFAULT_ID {
                records.push(Record::Namespace(record::Namespace {
                    id: *id,
                    namespace: known.fields.clone(),
                }));
            }
            if !known.settings.is_empty() {
                records.push(Record::NamespaceSet(record::NamespaceSet {
                    id: *id,
                    settings: known.settings,
                }));
            }
        }
        // The last id counts as used even if its namespace is deleted.
        let last = NamespaceId(table.next - 1);
        if !table.by_id.contains_key(&last) {
            records.push(Record::NamespaceGone(record::NamespaceGone { id: last }));
        }
        records
    }

    /// Applies a record about a namespace. Other records change nothing.
    pub fn apply(&self, record: Record) {
        match record {
            Record::Namespace(created) => self.insert(created.id, created.namespace),
            Record::NamespaceSet(changed) => {
                self.set(changed.id, changed.settings);
            }
            Record::NamespaceGone(gone) => self.remove(gone.id),
            _ => {}
        }
    }

    /// The namespaces with settings.
    pub fn with_settings(&self) -> Vec<(NamespaceId, NamespaceSettings)> {
        let table = self.table.read();
        let set = table.by_id.iter();
        set.filter(|(_, known)| !known.settings.is_empty())
            .map(|(id, known)| (*id, known.settings))
            .collect()
    }

    /// The number of namespaces, with the default one.
    pub fn count(&self) -> usize {
        self.table.read().by_id.len()
    }

    /// A namespace by id.
    pub fn get(&self, id: NamespaceId) -> Option<Known> {
        self.table.read().by_id.get(&id).cloned()
    }

    /// Calls `f` with each namespace, in the order of the ids.
    pub fn each(&self, mut f: impl FnMut(NamespaceId, &Known)) {
        for (id, known) in &self.table.read().by_id {
            f(*id, known);
        }
    }

    /// Every name, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.table.read().by_name.keys().cloned().collect();
        names.sort();
        names
    }
}

impl Table {
    /// Records that an id was given.
    fn note(&mut self, id: NamespaceId) {
        self.next = self.next.max(id.0.saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Setting;

    fn named(name: &str) -> Namespace {
        Namespace {
            name: name.into(),
            ..Namespace::default()
        }
    }

    fn add(namespaces: &Namespaces, name: &str) -> NamespaceId {
        let (id, is_new) = namespaces.find_or_number(&named(name)).unwrap();
        assert!(is_new);
        namespaces.insert(id, named(name));
        id
    }

    fn reloaded(namespaces: &Namespaces) -> Namespaces {
        let again = Namespaces::default();
        for record in namespaces.records() {
            again.apply(record);
        }
        again
    }

    #[test]
    fn an_id_is_never_used_again() {
        let namespaces = Namespaces::default();
        let [a, b] = ["a", "b"].map(|name| add(&namespaces, name));
        namespaces.remove(b);
        assert_eq!(namespaces.resolve("b"), Err(Code::UnknownNamespace));
        let again = reloaded(&namespaces);
        let c = add(&again, "b");
        assert!(c > b && b > a);
        again.remove(a);
        assert_eq!(add(&reloaded(&again), "a"), NamespaceId(c.0 + 1));
    }

    #[test]
    fn settings_survive_a_load_and_go_with_their_namespace() {
        let namespaces = Namespaces::default();
        let a = add(&namespaces, "a");
        let settings = NamespaceSettings::default().with(Setting::Priority, 2);
        assert!(namespaces.set(a, settings) && namespaces.set(DEFAULT_ID, settings));
        let again = reloaded(&namespaces);
        assert_eq!(
            again.with_settings(),
            [(DEFAULT_ID, settings), (a, settings)]
        );
        again.remove(a);
        assert_eq!(again.with_settings(), [(DEFAULT_ID, settings)]);
        assert!(!again.set(a, settings), "it is gone");
    }

    #[test]
    fn a_namespace_that_leaves_is_unknown_until_the_deletion_is_given_up() {
        let namespaces = Namespaces::default();
        let a = add(&namespaces, "a");
        namespaces.begin_deletion(a);
        assert_eq!(namespaces.resolve("a"), Err(Code::UnknownNamespace));
        assert_eq!(
            namespaces.find_or_number(&named("a")),
            Err(Code::InProgress)
        );
        assert!(!namespaces.is_known(a));
        namespaces.give_up_deletion(a);
        assert_eq!(namespaces.resolve("a"), Ok(a));
    }
}
