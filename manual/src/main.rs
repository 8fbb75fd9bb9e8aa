//! `kvpool-manual DIRECTORY` writes the man pages and shell completions of the three programs.
//!
//! They come from the clap definitions that the programs parse with, so they name every flag.
//! The programs themselves carry no generator: an operator's binary needs none. `cargo xtask dist` runs this.
//!
//! ```text
//!  DIRECTORY/man/man1/kvctl-status.1                          one page a program and a subcommand
//!  DIRECTORY/bash-completion/completions/kvctl
//!  DIRECTORY/zsh/site-functions/_kvctl
//!  DIRECTORY/fish/vendor_completions.d/kvctl.fish
//! ```
//!
//! The paths are the paths below `share` where man, bash, zsh and fish look.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// Each shell, and the directory below `share` that it loads completions from.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions"),
    (Shell::Zsh, "zsh/site-functions"),
    (Shell::Fish, "fish/vendor_completions.d"),
];

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(directory), None) = (arguments.next(), arguments.next()) else {
        bail!("usage: kvpool-manual DIRECTORY");
    };
    write_all(&PathBuf::from(directory))
}

fn programs() -> [Command; 3] {
    [
        kvpool_master::Flags::command(),
        kvpool_store_node::Flags::command(),
        kvctl::Cli::command(),
    ]
}

fn write_all(share: &Path) -> Result<()> {
    for mut program in programs() {
        let name = program.get_name().to_owned();
        // First: the completions add a subcommand `help` to the definition, and to each of its subcommands.
        let pages = share.join("man/man1");
        std::fs::create_dir_all(&pages)
            .with_context(|| format!("cannot make {}", pages.display()))?;
        clap_mangen::generate_to(program.clone(), &pages)
            .with_context(|| format!("cannot write the man pages of {name}"))?;
        for (shell, below) in SHELLS {
            let file = match shell {
                // bash-completion loads the file with the name of the command.
                Shell::Bash => name.clone(),
                Shell::Zsh => format!("_{name}"),
                _ => format!("{name}.fish"),
            };
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut program, &name, &mut script);
            write(&share.join(below).join(file), &script)?;
        }
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let parent = path.parent().context("the path has no directory")?;
    std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests;
