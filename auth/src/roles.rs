//! The roles of a caller, as bits.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::BitOr;

/// A set of operations that a caller may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads blocks and their metadata.
    Reader,
    /// Reads, puts and removes blocks by key.
    Writer,
    /// Does all operations on blocks and their namespaces. With the pattern `*` also all operations on nodes.
    Admin,
    /// Is a store node: it registers, and reads the blocks that it copies from other nodes.
    Node,
    /// Sees the state of the whole pool, and no block.
    Operator,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 5] = [
        Self::Reader,
        Self::Writer,
        Self::Admin,
        Self::Node,
        Self::Operator,
    ];

    /// The role's name in policies and messages.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Writer => "writer",
            Self::Admin => "admin",
            Self::Node => "node",
            Self::Operator => "operator",
        }
    }
}

/// A set of roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Roles(u8);

impl Roles {
    /// No role.
    pub const NONE: Self = Self(0);
    /// Roles that may read blocks.
    pub const READERS: Self = Self::of(&[Role::Reader, Role::Writer, Role::Admin]);
    /// Roles that may put blocks.
    pub const WRITERS: Self = Self::of(&[Role::Writer, Role::Admin]);
    /// Roles for forced removals and for changes of namespaces, nodes, media and tasks.
    pub const ADMINS: Self = Self::of(&[Role::Admin]);
    /// Roles that may see the whole pool.
    pub const WATCHERS: Self = Self::of(&[Role::Operator, Role::Admin]);
    /// Roles of store nodes.
    pub const NODES: Self = Self::of(&[Role::Node]);

    /// The set of `roles`.
    pub const fn of(roles: &[Role]) -> Self {
        let mut bits = 0;
        let mut rest = roles;
        while let [first, others @ ..] = rest {
            bits |= 1 << (*first as u8);
            rest = others;
        }
        Self(bits)
    }

    /// Whether one of `others` is in the set.
    pub const fn has_any(self, others: Self) -> bool {
        self.0 & others.0 != 0
    }

    /// The roles in both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The roles in the set.
    pub fn iter(self) -> impl Iterator<Item = Role> {
        let all = Role::ALL.into_iter();
        all.filter(move |role| self.has_any(Self::of(&[*role])))
    }
}

impl BitOr for Roles {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = self.iter().map(Role::label);
        f.write_str(words.next().unwrap_or("none"))?;
        words.try_for_each(|word| write!(f, ", {word}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_roles_that_it_was_made_of() {
        for role in Role::ALL {
            let set = Roles::of(&[role]);
            for other in Role::ALL {
                assert_eq!(set.has_any(Roles::of(&[other])), role == other);
            }
        }
        assert_eq!(Roles::WRITERS.to_string(), "writer, admin");
        assert_eq!(Roles::NONE.to_string(), "none");
    }
}
