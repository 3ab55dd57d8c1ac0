/** Throw an error where something does not hold. @param {unknown} holds @param {string} otherwise @returns {asserts holds} */
export function check(holds, otherwise) {
  if (!holds) {
    throw new Error(otherwise);
  }
}
