//! The policy: which roles the subjects and claims of tokens have, and in which namespaces.

use crate::claims::Claims;
use crate::pattern::Pattern;
use crate::roles::{Role, Roles};
use crate::toml_problem::toml_problem;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// The most rules of a policy. It bounds the work of judging a token.
const MOST_RULES: usize = 10_000;

/// Why a policy cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The text is not a policy.
    #[error("{0}")]
    Unreadable(String),
    /// The policy gives nobody a role.
    #[error("it has no rule: every caller would be refused")]
    NoRule,
    /// A rule can never apply, or has no effect.
    #[error("rule {number}: {problem}")]
    Rule {
        /// The number of the rule, from 1.
        number: usize,
        /// Why the rule cannot be used.
        problem: String,
    },
}

/// A policy. Every rule that a token fulfils adds its roles.
///
/// ```
/// let policy = kvpool_auth::Policy::parse(
///     r#"
///     [[rule]]
///     subject = "system:serviceaccount:team-a:*"
///     claims = { "/kubernetes.io/namespace" = "team-a" }
///     roles = ["writer"]
///     namespaces = ["team-a", "team-a-*"]
///     "#,
/// );
/// assert!(policy.is_ok());
/// ```
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    #[serde(default, rename = "rule")]
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    /// Pattern of the claim `sub`.
    subject: Option<Pattern>,
    /// Patterns by the name of a claim, or by its path (`/a/b`, a JSON pointer).
    #[serde(default)]
    claims: BTreeMap<String, Pattern>,
    roles: Vec<Role>,
    #[serde(default)]
    namespaces: Vec<Pattern>,
}

impl Policy {
    /// Reads a policy.
    ///
    /// # Errors
    ///
    /// [`PolicyError`] when the text is not a policy, or when a rule has no effect.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let policy: Self = toml::from_str(text)
            .map_err(|error| PolicyError::Unreadable(toml_problem(text, &error)))?;
        let bad = |at: usize, problem: &str| PolicyError::Rule {
            number: at + 1,
            problem: problem.to_owned(),
        };
        if policy.rules.len() > MOST_RULES {
            return Err(bad(MOST_RULES, "a policy has at most 10000 rules"));
        }
        for (at, rule) in policy.rules.iter().enumerate() {
            if rule.subject.is_none() && rule.claims.is_empty() {
                let why = "it names no subject and no claim: write subject = \"*\" for every token";
                return Err(bad(at, why));
            }
            let in_namespaces = Roles::of(&rule.roles).has_any(Roles::READERS);
            if rule.roles.is_empty() || in_namespaces && rule.namespaces.is_empty() {
                let why =
                    "it gives nothing: name roles, and for reader, writer and admin namespaces";
                return Err(bad(at, why));
            }
        }
        Ok(policy)
    }

    /// Whether it has no rule, and so refuses every caller.
    pub(crate) const fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Whether a rule names exactly this subject, and no claims.
    pub fn has_rule_of(&self, subject: &str) -> bool {
        self.rules.iter().any(|rule| {
            let named = rule.subject.as_ref().map(Pattern::as_str);
            named == Some(subject) && rule.claims.is_empty()
        })
    }

    /// The roles of a token with these claims.
    pub(crate) fn identity(&self, claims: Claims) -> Identity {
        let fulfilled = self.rules.iter().filter(|rule| rule.applies(&claims));
        let grants: Vec<_> = fulfilled
            .map(|rule| (Roles::of(&rule.roles), rule.namespaces.clone()))
            .collect();
        let all = grants.iter();
        let pool = all.clone().fold(Roles::NONE, |pool, (roles, namespaces)| {
            // The roles operator and node have no namespaces: they are for the whole pool.
            let own = Roles::of(&[Role::Node, Role::Operator]).and(*roles);
            let every = namespaces.iter().any(Pattern::is_every);
            pool | if every { *roles } else { own }
        });
        Identity {
            subject: claims.sub,
            expires: claims.exp,
            anywhere: all.fold(Roles::NONE, |sum, (roles, _)| sum | *roles),
            pool,
            grants,
        }
    }
}

impl Rule {
    fn applies(&self, claims: &Claims) -> bool {
        let subject = self.subject.as_ref();
        subject.is_none_or(|subject| subject.matches(&claims.sub))
            && self
                .claims
                .iter()
                .all(|(path, wanted)| claim(claims, path).is_some_and(|value| holds(value, wanted)))
    }
}

fn claim<'a>(claims: &'a Claims, path: &str) -> Option<&'a Value> {
    let Some(path) = path.strip_prefix('/') else {
        return claims.others.get(path);
    };
    let unescaped = |step: &str| step.replace("~1", "/").replace("~0", "~");
    let mut steps = path.split('/').map(unescaped);
    let first = claims.others.get(&steps.next()?)?;
    steps.try_fold(first, |value, step| match value {
        Value::Object(fields) => fields.get(&step),
        Value::Array(items) => items.get(step.parse::<usize>().ok()?),
        _ => None,
    })
}

/// Whether a claim, or one of its elements, is a text that `wanted` matches.
fn holds(value: &Value, wanted: &Pattern) -> bool {
    match value {
        Value::String(text) => wanted.matches(text),
        Value::Array(items) => items
            .iter()
            .any(|item| item.as_str().is_some_and(|text| wanted.matches(text))),
        Value::Bool(truth) => wanted.matches(if *truth { "true" } else { "false" }),
        _ => false,
    }
}

/// The holder of a verified token.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    subject: String,
    expires: u64,
    anywhere: Roles,
    pool: Roles,
    grants: Vec<(Roles, Vec<Pattern>)>,
}

impl Identity {
    /// The subject of the token.
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// When the token ends, in seconds since 1970.
    pub const fn expires(&self) -> u64 {
        self.expires
    }

    /// Whether the token has ended, the leeway for clocks included.
    pub fn has_expired(&self) -> bool {
        crate::now() > self.expires.saturating_add(crate::claims::LEEWAY_S)
    }

    /// The roles in `namespace`.
    pub fn roles_in(&self, namespace: &str) -> Roles {
        let grants = self.grants.iter();
        let here = grants.filter(|(_, patterns)| patterns.iter().any(|p| p.matches(namespace)));
        here.fold(Roles::NONE, |sum, (roles, _)| sum | *roles)
    }

    /// The patterns of the namespaces in which the token has this role. Empty for a role without namespaces.
    pub fn namespaces_of(&self, role: Role) -> Vec<String> {
        if Roles::of(&[Role::Node, Role::Operator]).has_any(Roles::of(&[role])) {
            return Vec::new();
        }
        let grants = self.grants.iter();
        let grants = grants.filter(|(roles, _)| roles.has_any(Roles::of(&[role])));
        let patterns = grants.flat_map(|(_, patterns)| patterns);
        patterns.map(|one| one.as_str().to_owned()).collect()
    }

    /// The roles for the whole pool: roles of rules for every namespace, and roles that have no
    /// namespace.
    pub const fn pool_roles(&self) -> Roles {
        self.pool
    }

    /// The roles anywhere; empty for a token that the policy does not know.
    pub const fn any_roles(&self) -> Roles {
        self.anywhere
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            subject, anywhere, ..
        } = self;
        write!(f, "Identity({subject:?}: {anywhere})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn identity(policy: &str, claims: Value) -> Identity {
        let claims = serde_json::from_value(claims).unwrap();
        Policy::parse(policy).unwrap().identity(claims)
    }

    #[test]
    fn a_role_is_told_with_the_namespaces_of_all_its_rules() {
        let policy = r#"
        [[rule]]
        subject = "*"
        roles = ["reader", "operator"]
        namespaces = ["shared"]
        [[rule]]
        subject = "a"
        roles = ["reader", "writer"]
        namespaces = ["team-*"]
        "#;
        let known = identity(policy, json!({ "iss": "i", "sub": "a", "exp": 1 }));
        assert_eq!(known.namespaces_of(Role::Reader), ["shared", "team-*"]);
        assert_eq!(known.namespaces_of(Role::Writer), ["team-*"]);
        assert!(known.namespaces_of(Role::Operator).is_empty());
    }

    const KUBERNETES: &str = r#"
        [[rule]]
        subject = "system:serviceaccount:a:*"
        claims = { "/kubernetes.io/namespace" = "a" }
        roles = ["writer"]
        namespaces = ["a", "a-*"]
        [[rule]]
        claims = { groups = "sre" }
        roles = ["operator"]
    "#;

    #[test]
    fn every_fulfilled_rule_adds_its_roles() {
        let base = json!({
            "iss": "i", "exp": 5, "sub": "system:serviceaccount:a:w",
            "kubernetes.io": { "namespace": "a" }, "groups": ["x", "sre"],
        });
        let both = identity(KUBERNETES, base.clone());
        assert_eq!(both.roles_in("a"), Roles::of(&[Role::Writer]));
        assert_eq!(both.roles_in("a-1"), Roles::of(&[Role::Writer]));
        assert_eq!(both.roles_in("b"), Roles::NONE);
        assert_eq!(both.pool_roles(), Roles::of(&[Role::Operator]));
        let mut other = base.clone();
        other["kubernetes.io"]["namespace"] = json!("b");
        assert_eq!(identity(KUBERNETES, other).roles_in("a"), Roles::NONE);
        let mut none = base;
        none["sub"] = json!("someone");
        none["groups"] = json!("ops");
        assert!(identity(KUBERNETES, none).any_roles().is_empty());
    }

    #[test]
    fn admin_of_one_namespace_is_no_admin_of_the_pool() {
        let policy = |of: &str| {
            format!("[[rule]]\nsubject = \"*\"\nroles = [\"admin\"]\nnamespaces = [{of:?}]")
        };
        let claims = json!({ "iss": "i", "exp": 5, "sub": "s" });
        let one = identity(&policy("a"), claims.clone());
        assert!(one.roles_in("a").has_any(Roles::ADMINS));
        assert!(one.pool_roles().is_empty());
        let every = identity(&policy("*"), claims);
        assert!(every.pool_roles().has_any(Roles::ADMINS));
    }

    #[test]
    fn a_rule_that_says_nothing_is_refused() {
        for (text, said) in [
            ("[[rule]]\nroles = [\"node\"]", "no subject"),
            (
                "[[rule]]\nsubject = \"a\"\nroles = [\"writer\"]",
                "gives nothing",
            ),
            ("[[rule]]\nsubject = \"a\"\nroles = []", "gives nothing"),
            (
                "[[rule]]\nsubject = \"a\"\nroles = [\"king\"]",
                "unknown variant",
            ),
            (
                "[[rule]]\nsubject = \"a\"\nroles = [\"node\"]\nname = 1",
                "unknown field",
            ),
        ] {
            let error = Policy::parse(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
