//! `kvctl namespace`: namespaces, their quotas and limits, and their use.

use crate::connection::control_error;
use crate::context::Context;
use crate::size::parse_size;
use crate::{exit, output, shares};
use anyhow::bail;
use bytesize::ByteSize;
use clap::Subcommand;
use kvpool_client::{Client, NamespaceInfo};
use kvpool_types::namespace::DEFAULT_NAME;
use kvpool_types::{Code, Namespace, NamespaceSettings, Setting};
use serde::Serialize;
use std::collections::BTreeMap;

/// Create, change, delete and show namespaces, with their quotas and limits
///
/// Without a command it shows all namespaces: what they use, and what is set.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl namespaces
  kvctl namespace create team-a --memory-hard 64GiB --guaranteed 16GiB
  kvctl namespace change team-a --priority 7 --clear memory_soft
  kvctl namespace delete team-a --blocks")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Create(Create),
    Change(Change),
    Delete(Delete),
    Show(Show),
    /// Show all namespaces, as without a command
    List,
}

/// Create a namespace
///
/// Clients that connect create their namespace themselves. This sets its quotas before they do. A
/// namespace that exists with the same fields keeps its settings.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvctl namespace create team-a --dtype bf16 --memory-hard 64GiB --guaranteed 16GiB")]
struct Create {
    /// The name
    #[arg(value_parser = parse_name)]
    name: String,
    /// The model whose KV the namespace holds
    #[arg(long, default_value = "", hide_default_value = true)]
    model: String,
    /// The element type of the KV
    #[arg(long, default_value = "", hide_default_value = true)]
    dtype: String,
    /// The part of the model's KV, as 0/2
    #[arg(long, default_value = "", hide_default_value = true)]
    parallel_rank: String,
    /// Any further text that separates chains
    #[arg(long, default_value = "", hide_default_value = true)]
    salt: String,
    #[command(flatten)]
    settings: Settings,
}

/// Change quotas and limits of a namespace
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl namespace change team-a --memory-hard 128GiB
  kvctl namespace change team-a --clear memory_hard --clear priority")]
struct Change {
    /// The name
    #[arg(value_parser = parse_name)]
    name: String,
    #[command(flatten)]
    settings: Settings,
    /// Remove a setting, by its name in `kvctl namespace show`; may be repeated
    #[arg(long, value_name = "SETTING", value_parser = parse_setting)]
    clear: Vec<Setting>,
}

/// Delete a namespace
///
/// A namespace that has blocks or open puts is refused without --blocks.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvctl namespace delete team-a --blocks")]
struct Delete {
    /// The name
    #[arg(value_parser = parse_name)]
    name: String,
    /// Also remove its blocks, despite leases and pins
    #[arg(long)]
    blocks: bool,
}

/// Show one namespace
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvctl namespace show team-a")]
struct Show {
    /// The name
    #[arg(value_parser = parse_name)]
    name: String,
}

/// The quotas and limits of a namespace.
#[derive(Debug, Default, clap::Args)]
struct Settings {
    /// Above this much memory its blocks are evicted first
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    memory_soft: Option<ByteSize>,
    /// The most memory, with open puts. When it is used, puts evict the namespace's own blocks
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    memory_hard: Option<ByteSize>,
    /// The most room on media. Beyond it blocks get no copy
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    media_hard: Option<ByteSize>,
    /// Above this many blocks in memory its blocks are evicted first
    #[arg(long, value_name = "BLOCKS")]
    blocks_soft: Option<u64>,
    /// The most blocks in memory, with open puts
    #[arg(long, value_name = "BLOCKS")]
    blocks_hard: Option<u64>,
    /// Memory that eviction for other namespaces leaves to it
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    guaranteed: Option<ByteSize>,
    /// The class of eviction, 0 to 9: lower ones are evicted first [default: 5]
    #[arg(long, value_name = "CLASS")]
    priority: Option<u64>,
    /// The most calls a second
    #[arg(long, value_name = "CALLS")]
    requests_per_second: Option<u64>,
    /// The most bytes a second of blocks that puts reserve and lookups find
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    bytes_per_second: Option<ByteSize>,
}

impl Settings {
    fn read(&self) -> NamespaceSettings {
        let bytes = |size: Option<ByteSize>| size.map(|size| size.as_u64());
        let mut settings = NamespaceSettings::default();
        for (setting, value) in [
            (Setting::MemorySoft, bytes(self.memory_soft)),
            (Setting::MemoryHard, bytes(self.memory_hard)),
            (Setting::MediaHard, bytes(self.media_hard)),
            (Setting::BlocksSoft, self.blocks_soft),
            (Setting::BlocksHard, self.blocks_hard),
            (Setting::Guaranteed, bytes(self.guaranteed)),
            (Setting::Priority, self.priority),
            (Setting::Requests, self.requests_per_second),
            (Setting::Bytes, bytes(self.bytes_per_second)),
        ] {
            settings.set(setting, value);
        }
        settings
    }
}

/// A client without a namespace uses `default`. An operator must name the namespace that a command
/// creates, changes or deletes.
fn parse_name(text: &str) -> Result<String, String> {
    match text {
        "" => Err(format!(
            "the name is empty; `{DEFAULT_NAME}` is the namespace of clients that name none"
        )),
        name => Ok(name.to_owned()),
    }
}

fn parse_setting(text: &str) -> Result<Setting, String> {
    Setting::from_label(text).ok_or_else(|| {
        let names: Vec<_> = Setting::ALL.iter().map(|setting| setting.label()).collect();
        format!("no such setting; there are {}", names.join(", "))
    })
}

/// A namespace, as `--output json` gives it.
#[derive(Serialize)]
struct Shown {
    name: String,
    model: String,
    dtype: String,
    parallel_rank: String,
    salt: String,
    memory_bytes: u64,
    media_bytes: u64,
    blocks: u64,
    copies: u64,
    open_puts: u64,
    /// The settings that are set, by name.
    settings: BTreeMap<&'static str, u64>,
    /// The problems of the new settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
}

impl From<NamespaceInfo> for Shown {
    fn from(info: NamespaceInfo) -> Self {
        let settings = info.settings.iter();
        Self {
            settings: settings.map(|(s, value)| (s.label(), value)).collect(),
            name: info.namespace.name,
            model: info.namespace.model,
            dtype: info.namespace.dtype,
            parallel_rank: info.namespace.parallel_rank,
            salt: info.namespace.salt,
            memory_bytes: info.memory.0,
            media_bytes: info.media.0,
            blocks: info.blocks,
            copies: info.copies,
            open_puts: info.open_puts,
            warning: None,
        }
    }
}

#[derive(Serialize)]
struct Created {
    name: String,
    created: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
}

/// The problem of a guaranteed share that was just set. It needs a token that shows the pool.
async fn warning_of(client: &Client, settings: &NamespaceSettings) -> Option<String> {
    settings.get(Setting::Guaranteed)?;
    let stats = client.stats().await.ok()?;
    shares::problem(&stats)
}

fn with_warning(mut text: String, warning: Option<&str>) -> String {
    if let Some(warning) = warning {
        text.push_str(&format!("\nwarning: {warning}"));
    }
    text
}

#[derive(Serialize)]
struct Deleted {
    name: String,
    removed: u64,
}

impl Change {
    /// The settings to change. Fails when no setting changes, or when one setting is both set and
    /// cleared.
    fn read(&self) -> anyhow::Result<NamespaceSettings> {
        let settings = self.settings.read();
        if settings.is_empty() && self.clear.is_empty() {
            bail!("nothing to change: name a setting, or --clear one");
        }
        let mut clear = self.clear.iter();
        match clear.find(|setting| settings.get(**setting).is_some()) {
            Some(setting) => Err(exit::Usage(format!(
                "{setting} is set and cleared at once: leave out its flag, or --clear {setting}"
            ))
            .into()),
            None => Ok(settings),
        }
    }
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    if let Some(Command::Change(change)) = &args.command {
        change.read()?;
    }
    let client = context.connection.connect().await?;
    match args.command {
        None | Some(Command::List) => {
            let all = client.namespaces().await.map_err(control_error)?;
            let all: Vec<Shown> = all.into_iter().map(Shown::from).collect();
            context.output.show(&all, |all| several(all))
        }
        Some(Command::Show(Show { name })) => {
            let info = client.namespace(&name).await.map_err(control_error)?;
            context.output.show(&Shown::from(info), one)
        }
        Some(Command::Create(create)) => {
            let settings = create.settings.read();
            let namespace = Namespace {
                name: create.name.clone(),
                model: create.model,
                dtype: create.dtype,
                parallel_rank: create.parallel_rank,
                salt: create.salt,
            };
            let created = client.create_namespace(namespace, &settings).await;
            let mut created = Created {
                name: create.name,
                created: created.map_err(control_error)?,
                warning: None,
            };
            if !created.created && !settings.is_empty() {
                bail!(
                    "namespace {} exists, and keeps its settings: use `kvctl namespace change`",
                    created.name
                );
            }
            created.warning = warning_of(&client, &settings).await;
            context.output.show(&created, |created| {
                let what = if created.created {
                    "is created"
                } else {
                    "exists"
                };
                let text = format!("namespace {} {what}", created.name);
                with_warning(text, created.warning.as_deref())
            })
        }
        Some(Command::Change(change)) => {
            let settings = change.read()?;
            let changed = client.change_namespace(&change.name, &settings, &change.clear);
            let changed = changed.await.map_err(control_error)?;
            let mut shown = Shown::from(changed);
            shown.warning = warning_of(&client, &settings).await;
            context.output.show(&shown, one)
        }
        Some(Command::Delete(Delete { name, blocks })) => {
            let removed = match client.delete_namespace(&name, blocks).await {
                Err(error) if error.code == Code::NamespaceInUse => bail!(
                    "namespace {name} has blocks or open puts. Nothing was changed: repeat with \
                     --blocks to remove them"
                ),
                removed => removed.map_err(control_error)?,
            };
            context.output.show(&Deleted { name, removed }, |deleted| {
                let removed = output::count(deleted.removed);
                format!(
                    "namespace {} is deleted, with {removed} blocks",
                    deleted.name
                )
            })
        }
    }
}

fn several(all: &[Shown]) -> String {
    let header = ["namespace", "blocks", "memory", "copies", "media", "set"];
    let mut table = output::table(header);
    for shown in all {
        let settings = shown.settings.iter();
        let set: Vec<_> = settings
            .map(|(name, value)| format!("{name} {}", value_of(name, *value)))
            .collect();
        table.add_row([
            shown.name.clone(),
            output::count(shown.blocks),
            output::bytes(shown.memory_bytes),
            output::count(shown.copies),
            output::bytes(shown.media_bytes),
            set.join(", "),
        ]);
    }
    output::align_right(&mut table, 1..5);
    table.to_string()
}

fn one(shown: &Shown) -> String {
    let mut table = output::facts();
    table.add_row(["namespace", &shown.name]);
    for (name, value) in [
        ("model", &shown.model),
        ("dtype", &shown.dtype),
        ("parallel rank", &shown.parallel_rank),
        ("salt", &shown.salt),
    ] {
        if !value.is_empty() {
            table.add_row([name, value]);
        }
    }
    table.add_row(["blocks in memory", &output::count(shown.blocks)]);
    table.add_row(["memory", &output::bytes(shown.memory_bytes)]);
    table.add_row(["copies on media", &output::count(shown.copies)]);
    table.add_row(["media", &output::bytes(shown.media_bytes)]);
    table.add_row(["open puts", &output::count(shown.open_puts)]);
    for (name, value) in &shown.settings {
        table.add_row([*name, &value_of(name, *value)]);
    }
    with_warning(table.to_string(), shown.warning.as_deref())
}

/// A setting's value in its unit.
fn value_of(name: &str, value: u64) -> String {
    match Setting::from_label(name) {
        Some(
            Setting::MemorySoft | Setting::MemoryHard | Setting::MediaHard | Setting::Guaranteed,
        ) => output::bytes(value),
        Some(Setting::Bytes) => format!("{}/s", output::bytes(value)),
        _ => output::count(value),
    }
}
