//! `kvctl token create`.

use super::{ISSUER, JWKS, POLICY, SIGNING_KEY};
use crate::context::Context;
use crate::exit;
use anyhow::Context as _;
use clap::builder::NonEmptyStringValueParser;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use kvpool_auth::issue::{NewToken, SigningKey, append_public, publish, save_secret};
use kvpool_auth::{AuthSettings, Policy, Role, Roles, now};
use serde::Serialize;
use std::fmt::Write as _;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Make a token, and the keys and policy by which a pool judges it
///
/// The directory gets a signing key, the JWKS with its public half, and the policy, unless they are
/// there. The token goes to a file that only you can read. With --role, the policy gets a rule. A subject that
/// has a rule keeps it: change its rights in the policy file.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl token create --subject team-a --role writer --in team-a
  kvctl token create --subject monitoring --role operator --ttl 365days")]
pub(super) struct Args {
    /// Who the token is for
    #[arg(long, value_name = "NAME", value_parser = parse_subject)]
    subject: String,
    /// Directory of the key, the JWKS, the policy and the tokens
    #[arg(long, value_name = "DIR", default_value = "kvpool-auth")]
    dir: PathBuf,
    /// Give the subject this role in the policy; repeat for more
    #[arg(long, value_parser = role_parser())]
    role: Vec<Role>,
    /// Give the roles in this namespace, or in all that a pattern with * matches; repeat for more
    #[arg(long = "in", value_name = "NAMESPACE")]
    namespaces: Vec<String>,
    /// Time until the token expires
    #[arg(long, value_name = "TIME", value_parser = parse_life, default_value = "30days")]
    ttl: Duration,
    /// Issuer: the --auth-issuer of the daemons
    #[arg(long, value_name = "NAME", default_value = ISSUER, value_parser = NonEmptyStringValueParser::new())]
    issuer: String,
    /// Audience: the --auth-audience of the daemons
    #[arg(
        long,
        value_name = "NAME",
        default_value = AuthSettings::DEFAULT_AUDIENCE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    audience: String,
    /// Replace the subject's token file if there is one. The policy stays: edit it to take rights away
    #[arg(long)]
    replace: bool,
}

/// Reads a role by its name in the policy.
fn role_parser() -> impl TypedValueParser<Value = Role> {
    let help = |role| match role {
        Role::Reader => "Reads blocks",
        Role::Writer => "Reads, puts and removes blocks",
        Role::Admin => "Everything in its namespaces; with * also everything with nodes",
        Role::Node => "Is a store node",
        Role::Operator => "Sees the state of the whole pool, and no block",
    };
    let values = Role::ALL.map(|role| PossibleValue::new(role.label()).help(help(role)));
    PossibleValuesParser::new(values).try_map(|name| {
        let named = Role::ALL.into_iter().find(|role| role.label() == name);
        named.ok_or("not a role")
    })
}

#[derive(Serialize)]
struct Made {
    token_file: PathBuf,
    jwks: PathBuf,
    policy: PathBuf,
    issuer: String,
    audience: String,
    expires: u64,
}

/// The time until the token ends. Its claims count whole seconds.
fn parse_life(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(life) if life < Duration::from_secs(1) => {
            Err("a token lives for 1s or longer".to_owned())
        }
        read => read.map_err(|error| error.to_string()),
    }
}

fn parse_subject(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !text.is_empty() && text.len() <= 128 && text.chars().all(fits) && !text.starts_with('.') {
        return Ok(text.to_owned());
    }
    Err("a subject has letters, digits, - _ . and at most 128 of them".to_owned())
}

/// The rule of one subject, as the policy has it.
fn rule(args: &Args) -> Result<String, exit::Usage> {
    let usage = |why: &str| Err(exit::Usage(why.to_owned()));
    let in_namespaces = Roles::of(&args.role).has_any(Roles::READERS);
    if in_namespaces && args.namespaces.is_empty() {
        return usage("reader, writer and admin have namespaces: add --in NAMESPACE, or --in '*'");
    }
    if !in_namespaces && !args.namespaces.is_empty() {
        return usage("only reader, writer and admin have namespaces");
    }
    let quoted = |words: Vec<&str>| {
        let words = words.into_iter();
        let words: Vec<String> = words.map(|word| format!("{word:?}")).collect();
        words.join(", ")
    };
    let mut rule = format!("\n[[rule]]\nsubject = {:?}\n", args.subject);
    let roles = quoted(args.role.iter().map(|role| role.label()).collect());
    let namespaces = quoted(args.namespaces.iter().map(String::as_str).collect());
    // Writing to a string cannot fail.
    let _ = writeln!(rule, "roles = [{roles}]");
    if in_namespaces {
        let _ = writeln!(rule, "namespaces = [{namespaces}]");
    }
    match Policy::parse(&rule) {
        Ok(_) => Ok(rule),
        Err(error) => usage(&format!("the policy would not take it: {error}")),
    }
}

/// Whether the rule is still to be added to the policy at `path`. A second rule of the same subject would add its
/// roles and take none away. Operators seldom mean that.
fn is_new(rule: &str, subject: &str, path: &Path) -> anyhow::Result<bool> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    if text.contains(rule) {
        return Ok(false);
    }
    let policy = Policy::parse(&text);
    let policy = policy.with_context(|| format!("cannot use {}", path.display()))?;
    if !policy.has_rule_of(subject) {
        return Ok(true);
    }
    Err(exit::Usage(format!(
        "{} has a rule for {subject:?} already, and a second rule only adds rights: edit the rule there, \
         and run this command without --role for a token",
        path.display()
    ))
    .into())
}

fn signing_key(path: &Path) -> anyhow::Result<SigningKey> {
    if path.exists() {
        return Ok(SigningKey::load(path)?);
    }
    let key = SigningKey::generate()?;
    key.save(path)?;
    Ok(key)
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    let rule = match args.role.as_slice() {
        [] => None,
        _ => Some(rule(args)?),
    };
    let policy = args.dir.join(POLICY);
    let rule = match rule {
        Some(rule) if is_new(&rule, &args.subject, &policy)? => Some(rule),
        _ => None,
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(&args.dir)
        .with_context(|| format!("cannot make {}", args.dir.display()))?;
    let in_dir = |name: &str| args.dir.join(name);
    let file = in_dir(&format!("{}.token", args.subject));
    if file.exists() && !args.replace {
        return Err(exit::Usage(format!(
            "{} is there: add --replace, or name another subject",
            file.display()
        ))
        .into());
    }
    let key = signing_key(&in_dir(SIGNING_KEY))?;
    publish(&key, &in_dir(JWKS))?;
    let begins = now();
    let expires = begins.saturating_add(args.ttl.as_secs());
    let token = key.sign(&NewToken {
        subject: &args.subject,
        issuer: &args.issuer,
        audience: &args.audience,
        begins,
        expires,
    })?;
    let head = "# Which roles the subjects of tokens have: docs/operations/security.md.\n";
    if !in_dir(POLICY).exists() {
        append_public(&in_dir(POLICY), head)?;
    }
    if let Some(rule) = rule {
        append_public(&in_dir(POLICY), &rule)?;
    }
    save_secret(&file, &(token + "\n"))?;
    let made = Made {
        token_file: file,
        jwks: in_dir(JWKS),
        policy: in_dir(POLICY),
        issuer: args.issuer.clone(),
        audience: args.audience.clone(),
        expires,
    };
    context.output.show(&made, |made| {
        format!(
            "token of {} in {}\ndaemons: --auth-jwks {} --auth-policy {} --auth-issuer {} --auth-audience {}\n\
             clients: KVPOOL_TOKEN_FILE={}",
            args.subject,
            made.token_file.display(),
            made.jwks.display(),
            made.policy.display(),
            made.issuer,
            made.audience,
            made.token_file.display(),
        )
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_names_a_file_of_the_directory_only() {
        for good in ["a", "team-a", "node_1.x"] {
            assert!(parse_subject(good).is_ok(), "{good}");
        }
        for bad in ["", "../a", "a/b", ".hidden", "a b", "a\"b"] {
            assert!(parse_subject(bad).is_err(), "{bad}");
        }
    }
}
